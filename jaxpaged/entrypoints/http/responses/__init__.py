"""OpenAI's Responses API: answers as lists of items, which the server can keep and go on from."""
