"""Which blocks of a history are worth a query's attention, by their mean keys."""
