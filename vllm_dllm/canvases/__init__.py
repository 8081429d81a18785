"""Shows canvases to clients, between the chunks of their own stream and on a page.

This package runs in a server's API processes. docs/canvases.md describes the events.
"""
