"""A taskset as verifiers' own examples have them (of which no package has any), with a tool and two rewards."""

import verifiers.v1 as vf

__all__ = ["Reverse"]


class Letters(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def last(self, text: str) -> str:
        """The last letter of a text."""
        return text[-1]


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Letters(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def is_reversed(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def asked(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class Reverse(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        for text in ("abc", "stop"):
            data = ReverseData(prompt=f"Reverse {text}", system_prompt="Be brief.", answer=text[::-1])
            yield ReverseTask(data, self.config.task)


if __name__ == "__main__":
    Letters.run()
