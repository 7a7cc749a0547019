"""`contaccum doctor`: whether what training and searching need works on this machine, tried rather than asked."""
