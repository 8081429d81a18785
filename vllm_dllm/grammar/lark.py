"""Builds a Lark grammar, in llguidance's dialect, rule by rule."""

import json


class LarkRules:
    """The rules and terminals of one grammar, with names that it gives them."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._terminals: dict[str, str] = {}  # names, by body

    def add_rule(self, body: str, attribute: str = "") -> str:
        """Adds a rule and returns its name. `attribute`: such as "[lazy]"."""
        name = self.reserve_rule()
        self.define_rule(name, body, attribute)
        return name

    def reserve_rule(self) -> str:
        """Returns the name of a rule that is defined later, since it refers to itself."""
        self.rules.append("")
        return f"rule_{len(self.rules) - 1}"

    def define_rule(self, name: str, body: str, attribute: str = "") -> None:
        """Defines a rule that was reserved."""
        self.rules[int(name.removeprefix("rule_"))] = f"{name}{attribute}: {body}"

    def add_terminal(self, body: str) -> str:
        """Returns the name of the terminal for `body`: regular expressions joined by `&`, `|` and
        `~`."""
        if body not in self._terminals:
            self._terminals[body] = f"TERMINAL_{len(self._terminals)}"
        return self._terminals[body]

    def to_text(self, start: str) -> str:
        """Returns the text of the grammar, whose first rule is named `start`."""
        terminals = [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, *terminals]) + "\n"


def quote_literal(text: str) -> str:
    """Returns the text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False) if text else '""'
