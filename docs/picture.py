"""Makes docs/chat.svg: the real program with the built-in model, asked two questions.

Run it from the top of the repository: python docs/picture.py
"""

import asyncio
import re
from functools import partial
from pathlib import Path

from tqchat.settings import Settings
from tqchat.tui.app import ChatApp
from tqchat.tui.engine import open_engine

SIZE = (110, 36)
QUESTIONS = ("What is the capital of France?", "Give me three tips for sleeping better.")
PICTURE = Path(__file__).parent / "chat.svg"


async def main() -> None:
    settings = Settings(model="smollm2", temperature=0, max_tokens=400)
    app = ChatApp(partial(open_engine, settings), settings)
    async with app.run_test(size=SIZE) as pilot:
        await idle(app)
        for question in QUESTIONS:
            await pilot.press(*question, "enter")
            await pilot.pause(1.0)
            await idle(app)
        await pilot.pause(1.0)
        # Without the web fonts: a page that shows the picture may not load them.
        picture = re.sub(r"@font-face \{.*?\}\s*", "", app.export_screenshot(), flags=re.DOTALL)
        PICTURE.write_text(picture, encoding="utf-8")
    app.close_engine()


async def idle(app: ChatApp) -> None:
    while app.busy:
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
