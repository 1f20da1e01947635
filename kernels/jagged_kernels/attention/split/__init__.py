"""Few queries over long histories: rows cut into spans, partial states merged."""
