"""The OpenAI API: what requests and answers look like, and the endpoints that serve them."""
