"""Who does what: the tables that everything irregular about a batch is in."""
