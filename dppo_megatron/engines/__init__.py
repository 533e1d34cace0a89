"""Start, call and check inference engines: the protocol of all clients, and one folder for each kind of server."""
