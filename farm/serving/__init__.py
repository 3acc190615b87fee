"""The server: the API and the pages as one app, its limits, and the process that runs it with the control loops."""
