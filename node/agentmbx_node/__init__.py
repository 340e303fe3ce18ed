"""The AgentMBX node: one daemon for each machine, and the `agentmbx` command."""
