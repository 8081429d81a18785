"""The rules of a Lark grammar as they are found, in llguidance's dialect."""

import json


class LarkRules:
    def __init__(self) -> None:
        self.rules: list[str] = []
        self._terminals: dict[str, str] = {}  # by body

    def add(self, body: str, attribute: str = "") -> str:
        """The name of a new rule."""
        name = self.reserve()
        self.define(name, body, attribute)
        return name

    def reserve(self) -> str:
        """The name of a rule that is to be defined, for rules that refer to themselves."""
        self.rules.append("")
        return f"rule_{len(self.rules) - 1}"

    def define(self, name: str, body: str, attribute: str = "") -> None:
        self.rules[int(name.removeprefix("rule_"))] = f"{name}{attribute}: {body}"

    def terminal(self, body: str) -> str:
        """The name of what matches `body`, regular expressions joined by `&`, `|` and `~`."""
        if body not in self._terminals:
            self._terminals[body] = f"TERMINAL_{len(self._terminals)}"
        return self._terminals[body]

    def text(self, start: str) -> str:
        """The whole grammar, whose first rule is named `start`."""
        terminals = [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, *terminals]) + "\n"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'
