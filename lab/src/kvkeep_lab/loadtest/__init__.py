"""Load for any server of OpenAI's API: requests that arrive by chance, and the times of their answers."""
