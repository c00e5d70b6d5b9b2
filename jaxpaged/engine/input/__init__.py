"""From what a client sends to what the core gets: text to token ids, chats to prompts; all that can be wrong there."""
