"""One HTML page about one or more runs: curves, tables, sample predictions, attention maps. It opens offline."""
