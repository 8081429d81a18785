"""Canvases for clients to watch: between the chunks of their own stream, and on a page.

Runs in a server's API processes. docs/canvases.md describes the events.
"""
