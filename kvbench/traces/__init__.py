"""Recorded and generated traces of LLM requests: one model, and one reader for each family of formats.

A trace says when requests came and how long they were; some also say which prompts begin alike (page ids) or carry
the texts themselves. Nothing here knows of loads or servers.
"""
