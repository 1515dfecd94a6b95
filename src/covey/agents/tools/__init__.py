"""Tools: built-in ones, functions of the user, tools of MCP servers; and running the calls of a turn."""
