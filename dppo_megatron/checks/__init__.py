"""Every rule about a config, before a process starts."""
