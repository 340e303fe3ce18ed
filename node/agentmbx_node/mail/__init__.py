"""What people and agents see: messages, and how their letters fare."""
