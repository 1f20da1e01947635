"""What everything stands on: operators, launches, backends, sizes. No jagged tensors yet."""
