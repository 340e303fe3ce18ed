"""AgentMBX protocol v1, pure: bytes and values in, values out or an exception (see SPEC.md)."""
