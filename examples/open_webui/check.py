"""Ask a server of kvkeep what Open WebUI asks it: its models, then a conversation that is sent whole each time.

kvkeep serve [MODEL] --port 8000        (or compose.yml beside this file)
python examples/open_webui/check.py [URL]        (the key stands in KVKEEP_API_KEY, if the server has one)
"""

import os
import sys

from openai import OpenAI  # pip install openai

TURNS = ("My dog is called Rex. He lives by the sea.", "What is my dog called?")


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key=os.environ.get("KVKEEP_API_KEY", "none"))
    (model, *_) = client.models.list().data
    print("model:", model.id)
    messages = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        answer, usage = "", None
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 30, "temperature": 0}
        for chunk in client.chat.completions.create(model=model.id, messages=messages, **options):
            answer += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
        messages.append({"role": "assistant", "content": answer})
        read = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        print(f"{text} {answer.strip()!r}  ({read} of {usage.prompt_tokens} tokens were read)")


if __name__ == "__main__":
    main(*sys.argv[1:])
