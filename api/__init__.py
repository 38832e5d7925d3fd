"""The HTTP front end, the client, and the supervisor of one machine's processes."""
