"""What training and evaluation share about language models: rows of ids, loading, exact losses."""
