"""Taskset for verifiers with a tool: the price has to be looked up."""

import verifiers.v1 as vf

PRICES = {"tea": 3, "nuts": 8}


class ShopToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """Price of an item."""
        return str(PRICES.get(item, "unknown"))


class ShopData(vf.TaskData):
    answer: str


class ShopConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopConfig]):
    @classmethod
    def toolsets(cls, config):
        return [ShopToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class ShopTasksetConfig(vf.TasksetConfig):
    task: ShopConfig = ShopConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopTasksetConfig]):
    def load(self):
        for item, price in PRICES.items():
            yield ShopTask(ShopData(prompt=f"What does {item} cost?", answer=str(price)), self.config.task)


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    ShopToolset.run()
