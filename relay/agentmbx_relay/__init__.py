"""The AgentMBX relay: holds sealed envelopes for queues, and signs that it holds them."""
