"""Stream a continuation to the terminal.   python examples/stream.py [HOST:PORT] [PROMPT]"""

import sys

from twinplane.client import Client, TwinplaneError

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"

try:
    with Client(target) as client, client.stream(prompt, max_tokens=64, temperature=0) as stream:
        print(prompt, end="")
        for delta in stream:
            print(delta.text, end="", flush=True)
        result = stream.result()
    print(f"\n\n{result.usage.completion_tokens} tokens, finished because of: {result.finish.reason}")
except TwinplaneError as error:
    sys.exit(f"{target}: {error}")
