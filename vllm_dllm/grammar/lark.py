"""Builds a Lark grammar, in llguidance's dialect, rule by rule."""

import json


class LarkRules:
    """The rules and terminals of one Lark grammar. It makes up their names."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._terminals: dict[str, str] = {}  # names, by body

    def add_rule(self, body: str, attribute: str = "") -> str:
        """Adds a rule and returns its name. `attribute` follows the name, such as "[lazy]"."""
        name = self.reserve_rule()
        self.define_rule(name, body, attribute)
        return name

    def reserve_rule(self) -> str:
        """Returns the name of a rule that `define_rule` defines later, because its body refers to
        itself."""
        self.rules.append("")
        return f"rule_{len(self.rules) - 1}"

    def define_rule(self, name: str, body: str, attribute: str = "") -> None:
        """Sets the body of a rule that `reserve_rule` has named."""
        self.rules[int(name.removeprefix("rule_"))] = f"{name}{attribute}: {body}"

    def add_terminal(self, body: str) -> str:
        """Adds a terminal if none has this body yet, and returns its name. `body` has regular
        expressions joined by `&`, `|` and `~`."""
        if body not in self._terminals:
            self._terminals[body] = f"TERMINAL_{len(self._terminals)}"
        return self._terminals[body]

    def to_text(self, start: str) -> str:
        """Returns the text of the grammar. `start` is the body of its first rule, mostly a rule's
        name."""
        terminals = [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, *terminals]) + "\n"


def quote_literal(text: str) -> str:
    """Returns the text as a quoted string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False) if text else '""'
