"""From texts to a ranked run: embedding shards, exact and approximate search, BM25."""
