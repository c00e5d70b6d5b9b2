"""`jaxpaged proxy`: one address in front of engines that compute prompts and engines that generate."""
