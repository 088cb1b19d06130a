"""Ask many questions at once; the server batches them.   python examples/many_at_once.py [HOST:PORT] [COUNT]"""

import asyncio
import sys
import time

from twinplane.client import AsyncClient


async def main(target: str, count: int) -> None:
    async with AsyncClient(target) as client:

        async def ask(number: int) -> int:
            messages = [{"role": "user", "content": f"Tell me one fact about the number {number}."}]
            result = await client.chat(messages, max_tokens=48, temperature=0)
            print(f"{number:>3}: {' '.join(result.text.split())[:100]}")
            return result.usage.completion_tokens

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(ask(number) for number in range(1, count + 1))))
        print(f"\n{tokens} tokens in {time.perf_counter() - began:.1f} s")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051", int(sys.argv[2]) if len(sys.argv) > 2 else 8))
