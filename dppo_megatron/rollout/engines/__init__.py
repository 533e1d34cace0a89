"""Start, call and check inference engines. All clients share a protocol; each kind of server has a folder."""
