"""Parts of scripts/test-gpu, which import only the standard library: nothing is installed yet."""
