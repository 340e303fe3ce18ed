"""The machine's one database: what it keeps of itself, its peers, and all letters."""
