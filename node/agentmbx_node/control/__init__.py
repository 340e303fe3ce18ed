"""The control socket: how commands reach this machine's daemon; the daemon's and caller's sides."""
