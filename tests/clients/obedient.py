"""What a model that obeys would write, by rules: suites of clients ask for wit that small models do not have.

`answer` reads a chat (JSON, as the template of tests/clients/scripted_model.py shows it) and the grammar that the ring
has asked for. It calls the tools that the text names ("Call double_number with value 21"), or that a grammar forces,
each once after a user's message; then it fills the schema of an answer, or says what it is told to say ("reply exactly
RESULT:42"), or reports what the tools said.
"""

import json
import re
from typing import Any

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])")
SAY = re.compile(
    r"\b(?:reply|answer|respond|return|say)(?: with| only| exactly| just)* [`'\"]?((?:[A-Z0-9_]|[:-](?=\w)){2,})"
    , re.IGNORECASE
)  # fmt: skip
NAMED = re.compile(r"\b[A-Z]{4,}\b")  # a word to be remembered
RECALL = re.compile(r"\bdid (?:I|the tool)\b[^?]*\?")  # a question about what was said before
QUOTED = re.compile(r"['\"`]([^'\"`]+)['\"`]")


def answer(chat: dict[str, Any], grammar: str) -> str:
    tools = {tool["function"]["name"]: tool["function"] for tool in chat["tools"]}
    messages = chat["messages"]
    asked = max((at for at, each in enumerate(messages) if each["role"] == "user"), default=0)
    told = " ".join(text_of(each) for each in messages if each["role"] in ("system", "developer"))
    wish = text_of(messages[asked]) if messages else ""
    made = {call["function"]["name"] for each in messages[asked:] for call in each.get("tool_calls") or ()}
    names = [name for name in wanted(tools, f"{told} {wish}", wish, grammar) if name not in made]
    thought = "<think>I do as I am told.</think>" if chat.get("effort") not in (None, "none") else ""
    if names:
        text = f"{wish} {told}"
        return thought + "\n".join(
            written(name, value(tools[name].get("parameters") or {}, "", told_of(name, text))) for name in names
        )
    shape = schema_of(grammar)
    if shape is not None:
        return thought + json.dumps(value(shape, "", f"{told} {wish}", shape), ensure_ascii=False)
    return thought + reply(messages, asked, told, wish)


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def wanted(tools: dict[str, Any], text: str, wish: str, grammar: str) -> list[str]:
    """Names of tools to call: those that the text names, else the likeliest if it is forced or its words are there."""
    forced, several = "start: calls" in grammar, re.search(r"\b(?:one|run)\)\{0,\d+\}", grammar)
    if not forced and RECALL.search(wish):
        return []
    offered = [name for name in tools if not forced or name in grammar]
    named = [name for name in offered if re.search(rf"\b{re.escape(name)}\b", text)]
    if named or not offered:
        return named[:1] if forced and not several else named
    likeness = {name: alike(f"{name} {tools[name].get('description') or ''}", wish) for name in offered}
    best = max(offered, key=lambda name: likeness[name])
    return [best] if forced or alike(best, text) else []


def told_of(name: str, text: str) -> str:
    """The text, with what follows the name first."""
    before, found, after = text.partition(name)
    return f"{after} {before}" if found else text


def alike(one: str, other: str) -> int:
    """Number of words of more than three letters that both have."""
    words = [set(re.findall(r"[a-z]{4,}", re.sub(r"[_-]", " ", text.lower()))) for text in (one, other)]
    return len(words[0] & words[1])


def written(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def schema_of(grammar: str) -> dict[str, Any] | None:
    """The JSON schema that an answer must have."""
    if not grammar.startswith("{"):
        return None
    schemas = [each.get("json_schema") for each in json.loads(grammar)["grammars"]]
    return next((schema for schema in schemas if schema is not None), None)


def value(schema: Any, name: str, text: str, root: dict[str, Any] | None = None) -> Any:
    """An instance of a schema, with what the text says of `name`."""
    root = root if root is not None else schema
    if not isinstance(schema, dict):
        return {}
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return value(found, name, text, root)
    for union in ("anyOf", "oneOf", "allOf"):
        if schema.get(union):
            some = [each for each in schema[union] if each.get("type") != "null"]
            is_null = len(some) < len(schema[union]) and (not some or re.search(rf"\b{name} null\b", text))
            return None if is_null else value(some[0], name, text, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return next((each for each in schema["enum"] if str(each) in text), schema["enum"][0])
    kind: Any = schema.get("type")
    kind = next((each for each in kind if each != "null"), "null") if isinstance(kind, list) else kind
    if kind == "object" or (kind is None and "properties" in schema):
        parts: dict[str, Any] = {}
        if not schema.get("properties") and not name:  # any object: one with the keys that the text quotes
            return {each: each for each in QUOTED.findall(text)}
        for each, part in schema.get("properties", {}).items():
            parts[each] = value(part, each, text, root)
            if isinstance(parts[each], int | float):  # the next one takes another number
                text = re.sub(rf"(?<![\w.]){re.escape(str(parts[each]))}(?![\w])", "", text, count=1)
        return parts
    if kind == "array":
        listed = re.search(rf"\b{re.escape(name)} (\[[^\]]*\])", text) if name else None
        if listed and schema.get("items", {}).get("type") in ("integer", "number"):
            return json.loads(listed[1])
        return [value(schema.get("items", {}), name, text, root)] * max(1, schema.get("minItems", 1))
    if kind in ("integer", "number"):
        said = re.search(rf"\b{re.escape(name)}\b[^\w-]{{1,3}}({NUMBER.pattern})", text) if name else None
        number = said[1] if said else next(iter(NUMBER.findall(text)), "1")
        return int(float(number)) if kind == "integer" else float(number)
    if kind == "boolean":
        return True
    return None if kind == "null" else word(name, text)


def word(name: str, text: str) -> str:
    """What the text says a name is: `name='x'` or `name READY`; else what it quotes, else its first words."""
    said = re.search(rf"\b{re.escape(name)}\b ?[=:] ?['\"]?([\w./-]+)|\b{re.escape(name)} ([A-Z]{{2,}}[\w-]*)", text)
    said = said or re.search(r"\braw string (\w+)()", text)
    if said:
        return str(said[1] or said[2])
    quoted = QUOTED.search(text)
    return quoted[1] if quoted else " ".join(text.split()[:8]) or name or "text"


def reply(messages: list[dict[str, Any]], asked: int, told: str, wish: str) -> str:
    results = [text_of(each) for each in messages[asked:] if each["role"] == "tool"]
    refused = re.search("reject|declin", " ".join(results).lower()) is not None
    for text in (wish, told):
        said = [each for each in SAY.findall(text) if each == each.upper()]
        if said:
            return str(next((each for each in said if ("REJECT" in each) == refused), said[-1]))
    if "verification number" in wish and "?" in wish:
        numbers = [each for message in messages[:asked] for each in NUMBER.findall(text_of(message))]
        return numbers[-1] if numbers else "none"
    if results:
        return f"The tools say: {'; '.join(results)}"
    said_before = [each for each in messages[:asked] if each["role"] not in ("system", "developer")]
    remembered = [each for message in said_before for each in NAMED.findall(text_of(message))]
    if remembered and "?" in wish:
        recalled = next((each for each in remembered if each not in ("STORED", "JSON")), remembered[0])
        before = re.search(r"\bPrefix the remembered word with ([A-Z]+):", told)
        return f"{before[1]}: {recalled}" if before else str(recalled)
    return f"Hello! You said: {wish[:400]}"
