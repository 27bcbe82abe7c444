"""The engine contract (vLLM's HTTP face), and the engines that are shipped with Bridle."""
