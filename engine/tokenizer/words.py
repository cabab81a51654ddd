"""Chats for models with random weights, whose tokens are words: ids 17, 4 are the text "17 4"."""

from __future__ import annotations

# A user's message of N ids becomes N + 2 tokens. 0, 1 and 2 mark nothing: they are the unknown, first and last token by
# default in Llama's configs and in llama.cpp, which also takes the last mark by itself for a text, without a space.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ ('4 ' if message['role'] == 'assistant' else '3 ') + message['content'] + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}4{% endif %}"
)
