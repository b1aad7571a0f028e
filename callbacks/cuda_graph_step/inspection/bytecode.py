"""A function's bytecode, walked once from top to bottom without running it: what it loads, calls, stores and uses.

What the values are is left to a `Reader`, which makes them and is told what happens to them. Control flow is followed
forwards only and a branch's stack is merged where it rejoins, which is enough to know who is called with what. A branch
is left out if an argument that is a literal in this call decides it, as in `if stage == "val"`.
Written for CPython 3.11 to 3.13; an opcode that is not known by name is taken by its stack effect.
"""

import dis
from collections.abc import Sequence
from functools import cache
from types import CodeType
from typing import Final

from fasttrain.callbacks.cuda_graph_step.inspection.reader import UNKNOWN, Constant, Entries, Items, Reader, Value

_NULL: Final[Value] = object()
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_LEAVES = ("RETURN_", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")
# These give nothing back; all else that takes as much as it gives or more replaces its operands by one result.
_TAKES = ("POP_", "STORE_", "DELETE_", "RETURN_", "RAISE_", "RERAISE", "LIST_", "SET_", "MAP_ADD", "DICT_", "YIELD_")
_GIVES = ("BINARY_", "UNARY_", "COMPARE_", "IS_", "CONTAINS_", "BUILD_", "FORMAT_", "CONVERT_", "GET_", "TO_", "CALL_")
_CLOSURE = 8  # the flag under which MAKE_FUNCTION takes its cells
_LIST_TO_TUPLE = 6  # of CALL_INTRINSIC_1


def walk(code: CodeType, variables: dict[str, Value], reader: Reader) -> None:
    """Hand what `code` does to `reader`. `variables`, its arguments and free variables, are changed as it stores."""
    _Walk(code, variables, reader).run()


class _Walk:
    def __init__(self, code: CodeType, variables: dict[str, Value], reader: Reader) -> None:
        self.code, self.variables, self.reader = code, variables, reader
        for name in _stored(code):
            if isinstance(variables.get(name), Constant):
                variables[name] = UNKNOWN  # a loop may come back with another value
        self.stack: list[Value] = []
        self.left_out_before = 0
        self.not_taken: set[int] = set()
        self.is_left_out = False
        self.reached = True
        self.waiting: dict[int, list[Value]] = {}
        self.keywords: tuple[str, ...] = ()

    def run(self) -> None:
        for op in dis.get_instructions(self.code):
            if self.leaves_out(op):
                continue
            self.arrive(op.offset)
            if op.positions is not None and op.positions.lineno is not None:
                self.reader.line = op.positions.lineno
            decided = self.decided(op)
            if op.opcode in _JUMPS and op.argval > op.offset and decided is not False:
                self.leave_for(op.argval, dis.stack_effect(op.opcode, op.arg, jump=True))
            self.act(op)
            self.left_out_before = op.argval if decided else 0
            if decided is False:
                self.not_taken.add(op.argval)
            self.reached = not (decided or op.opname.startswith(_LEAVES))

    def leaves_out(self, op: dis.Instruction) -> bool:
        """Whether no call of this kind gets here. Exception handlers are never left out; they may lie anywhere."""
        if op.offset in self.waiting or op.opname == "PUSH_EXC_INFO":
            self.left_out_before, self.is_left_out = 0, False
        elif op.offset in self.not_taken and not self.reached:
            self.is_left_out = True
        return self.is_left_out or op.offset < self.left_out_before

    def decided(self, op: dis.Instruction) -> bool | None:
        """Whether a forward jump is taken, if a literal decides that."""
        value = self.stack[-1] if self.stack else UNKNOWN
        if op.opcode not in _JUMPS or op.argval <= op.offset or not isinstance(value, Constant):
            return None
        if op.opname.endswith(("_NONE",)):
            return (value.value is None) is not op.opname.endswith("_NOT_NONE")
        if op.opname.endswith(("_IF_TRUE", "_IF_TRUE_OR_POP")):
            return bool(value.value)
        return not value.value if op.opname.endswith(("_IF_FALSE", "_IF_FALSE_OR_POP")) else None

    def arrive(self, offset: int) -> None:
        """Take over the stack of the branches that jump here. An exception handler starts with nothing known."""
        waiting = self.waiting.pop(offset, None)
        if not self.reached:
            self.stack = waiting or []
        elif waiting is not None and len(waiting) == len(self.stack):
            self.stack = _merged(self.stack, waiting)

    def leave_for(self, target: int, effect: int) -> None:
        stack = self.stack[:effect] if effect < 0 else [*self.stack, *[UNKNOWN] * effect]
        other = self.waiting.get(target, stack)
        self.waiting[target] = _merged(other, stack) if len(other) == len(stack) else max(other, stack, key=len)

    def act(self, op: dis.Instruction) -> None:
        done = self.variable(op) or self.name(op) or self.call(op) or self.store(op) or self.make(op)
        if not done:
            self.other(op)

    def pop(self, count: int = 1) -> list[Value]:
        """Remove and return the last values, oldest first; what the walk lost sight of is unknown."""
        missing = max(0, count - len(self.stack))
        taken = [UNKNOWN] * missing + self.stack[len(self.stack) - count + missing :]
        del self.stack[len(self.stack) - count + missing :]
        return taken

    def push(self, value: Value, with_null: bool = False) -> None:
        self.stack += [value, _NULL] if with_null else [value]

    def use(self, *values: Value) -> None:
        for value in values:
            if isinstance(value, Items):
                self.use(*value.values)
            elif isinstance(value, Entries):
                self.use(*value.values.values())
            elif value is not UNKNOWN and value is not _NULL and not isinstance(value, Constant):
                self.reader.use(value)

    def variable(self, op: dis.Instruction) -> bool:
        names = op.argval if isinstance(op.argval, tuple) else (op.argval,)
        match op.opname:
            case "STORE_FAST_LOAD_FAST":
                self.variables[names[0]] = _no_literal(*self.pop())
                self.push(self.variables.get(names[1], UNKNOWN))
            case "STORE_FAST" | "STORE_DEREF" | "STORE_NAME" | "STORE_FAST_STORE_FAST":
                for name in names:
                    self.variables[name] = _no_literal(*self.pop())
            case "LOAD_CLOSURE" | "LOAD_DEREF":
                self.push(self.variables.get(op.argval, UNKNOWN))
            case opname if opname.startswith("LOAD_FAST"):
                for name in names:
                    self.push(self.variables.get(name, UNKNOWN))
            case _:
                return False
        return True

    def name(self, op: dis.Instruction) -> bool:
        effect = dis.stack_effect(op.opcode, op.arg, jump=False)
        match op.opname:
            case "LOAD_GLOBAL" | "LOAD_NAME":
                self.stack += [_NULL] * (effect - 1)  # below, since an attribute may be taken of it before the call
                self.push(self.reader.load_global(op.argval))
            case "LOAD_ATTR" | "LOAD_METHOD":
                (owner,) = self.pop()
                self.push(self.reader.attribute(owner, op.argval), with_null=effect == 1)
            case "LOAD_SUPER_ATTR":
                made_by, *arguments = self.pop(3)
                parent = self.reader.call(made_by, arguments, {})
                self.push(self.reader.attribute(parent, op.argval), with_null=effect == -1)
            case "LOAD_CONST" | "LOAD_SMALL_INT":
                self.push(Constant(op.argval))
            case "IMPORT_NAME":
                self.pop(2)
                self.push(self.reader.imported(op.argval))
            case "IMPORT_FROM":
                self.push(self.reader.attribute(self.stack[-1] if self.stack else UNKNOWN, op.argval))
            case _:
                return False
        return True

    def call(self, op: dis.Instruction) -> bool:
        match op.opname:
            case "PUSH_NULL":
                self.push(_NULL)
            case "PRECALL":
                pass
            case "KW_NAMES":
                self.keywords = self.code.co_consts[op.arg or 0]
            case "CALL" | "CALL_KW":
                if op.opname == "CALL_KW":
                    (names,) = self.pop()
                    self.keywords = names.value if isinstance(names, Constant) else ()
                args = self.pop(op.arg or 0)
                callee, args = _callee(self.pop(2), args)
                first_named = len(args) - len(self.keywords)
                kwargs = dict(zip(self.keywords, args[first_named:], strict=False))
                self.keywords = ()
                self.push(self.reader.call(callee, args[:first_named], kwargs))
            case "CALL_FUNCTION_EX":
                *below, args, kwargs = self.pop(4 if (op.arg or 0) & 1 else 3) + (
                    [] if (op.arg or 0) & 1 else [Entries()]
                )
                callee, _ = _callee(below, [])
                self.use(*(value for value in (args, kwargs) if not isinstance(value, (Items, Entries))))
                positional = args.values if isinstance(args, Items) else ()
                all_known = isinstance(args, Items) and isinstance(kwargs, Entries)
                self.push(self.reader.call(callee, positional, kwargs.values if all_known else None))
            case _:
                return False
        return True

    def store(self, op: dis.Instruction) -> bool:
        match op.opname:
            case "STORE_ATTR":
                value, owner = self.pop(2)
                self.use(value)
                self.reader.store_attribute(owner, op.argval, value)
            case "DELETE_ATTR":
                self.reader.store_attribute(self.pop()[0], op.argval, UNKNOWN)
            case "STORE_SUBSCR":
                value, owner, key = self.pop(3)
                self.use(value, key)
                self.reader.store_item(owner, key)
            case "STORE_SLICE":
                value, owner, *bounds = self.pop(4)
                self.use(value, *bounds)
                self.reader.store_item(owner, UNKNOWN)
            case "DELETE_SUBSCR":
                owner, key = self.pop(2)
                self.use(key)
                self.reader.store_item(owner, key)
            case "STORE_GLOBAL":
                self.use(*self.pop())
                self.reader.store_global(op.argval)
            case _:
                return False
        return True

    def make(self, op: dis.Instruction) -> bool:
        """Containers and functions made in the code, and what takes containers apart."""
        match op.opname:
            case "BUILD_TUPLE" | "BUILD_LIST":
                self.push(Items(tuple(self.pop(op.arg or 0))))
            case "BUILD_MAP":
                flat = self.pop(2 * (op.arg or 0))
                self.push(self.entries(flat[::2], flat[1::2]))
            case "BUILD_CONST_KEY_MAP":
                *values, keys = self.pop((op.arg or 0) + 1)
                self.push(self.entries([Constant(key) for key in getattr(keys, "value", ())], values))
            case "LIST_EXTEND" | "LIST_APPEND" | "DICT_MERGE" | "DICT_UPDATE":
                self.extend(op.opname, op.arg or 1)
            case "LIST_TO_TUPLE":
                pass
            case "CALL_INTRINSIC_1" if op.arg == _LIST_TO_TUPLE:
                pass
            case "UNPACK_SEQUENCE" | "UNPACK_EX":
                self.unpack(self.pop()[0], op.arg or 0, starred=op.opname == "UNPACK_EX")
            case "BINARY_SUBSCR":
                self.subscript()
            case "MAKE_FUNCTION":
                flags = op.arg or 0
                *defaults, code = self.pop(1 + flags.bit_count())
                self.use(*(defaults[:-1] if flags & _CLOSURE else defaults))
                if isinstance(code, Constant) and isinstance(code.value, CodeType):
                    self.reader.nested(code.value, self.variables)
                self.push(UNKNOWN)
            case "SET_FUNCTION_ATTRIBUTE":
                attribute, function = self.pop(2)
                self.use(*([] if op.arg == _CLOSURE else [attribute]))
                self.push(function)
            case _:
                return False
        return True

    def other(self, op: dis.Instruction) -> None:
        match op.opname:
            case "COPY":
                depth = op.arg or 1
                self.push(self.stack[-depth] if depth <= len(self.stack) else UNKNOWN)
            case "SWAP":
                *between, last = self.pop(op.arg or 1)
                self.stack += [last, *between[1:], between[0]] if between else [last]
            case "BINARY_OP" if op.argrepr == "[]":
                self.subscript()
            case "COMPARE_OP" | "IS_OP" | "CONTAINS_OP" | "TO_BOOL" | "UNARY_NOT":
                operands = self.pop(1 - dis.stack_effect(op.opcode, op.arg))
                self.use(*operands)
                self.push(_outcome(op, operands))
            case "BINARY_OP":
                left, right = self.pop(2)
                self.use(left, right)
                self.push(self.reader.in_place(left) if op.argrepr.endswith("=") else UNKNOWN)
            case "POP_TOP":
                self.pop()
            case opname if opname.endswith(("_IF_NONE", "_IF_NOT_NONE")):
                self.pop()  # whether an argument is None doesn't change from step to step
            case _:
                self.by_effect(op)

    def by_effect(self, op: dis.Instruction) -> None:
        effect = dis.stack_effect(op.opcode, op.arg, jump=False)
        if op.opname.startswith(_GIVES) and effect <= 0:
            self.use(*self.pop(1 - effect))
            self.push(UNKNOWN)
        elif effect < 0 or op.opname.startswith(_TAKES):
            self.use(*self.pop(max(0, -effect)))
        else:
            self.stack += [UNKNOWN] * effect

    def entries(self, keys: Sequence[Value], values: Sequence[Value]) -> Value:
        if all(isinstance(key, Constant) and isinstance(key.value, str) for key in keys) and len(keys) == len(values):
            return Entries(dict(zip((key.value for key in keys), values, strict=True)))
        self.use(*keys, *values)
        return UNKNOWN

    def extend(self, opname: str, depth: int) -> None:
        (value,) = self.pop()
        target = self.stack[-depth] if depth <= len(self.stack) else UNKNOWN
        extended: Value = UNKNOWN
        if isinstance(target, Items) and (opname == "LIST_APPEND" or isinstance(value, Items)):
            extended = Items((*target.values, *([value] if opname == "LIST_APPEND" else value.values)))
        elif isinstance(target, Entries) and isinstance(value, Entries):
            extended = Entries({**target.values, **value.values})
        else:
            self.use(target, value)
        if depth <= len(self.stack):
            self.stack[-depth] = extended

    def unpack(self, value: Value, arg: int, starred: bool) -> None:
        before, after = (arg & 0xFF, arg >> 8) if starred else (arg, 0)
        parts: list[Value] = [UNKNOWN] * (before + starred + after)
        if (
            isinstance(value, Items)
            and len(value.values) >= before + after
            and (starred or len(value.values) == before)
        ):
            rest = len(value.values) - after
            parts = [*value.values[:before], *([Items(value.values[before:rest])] if starred else ())]
            parts += value.values[rest:] if starred else ()
        else:
            self.use(value)
        self.stack += reversed(parts)

    def subscript(self) -> None:
        owner, key = self.pop(2)
        self.use(key)
        known = key.value if isinstance(key, Constant) else None
        if not isinstance(owner, (Items, Entries)):
            self.push(self.reader.item(owner, key))
            return
        try:
            self.push(owner.values[known])  # type: ignore[index]
        except (LookupError, TypeError):
            self.use(owner)
            self.push(UNKNOWN)


def _callee(pair: Sequence[Value], args: list[Value]) -> tuple[Value, list[Value]]:
    """Return who is called and with what: below the arguments lie the callee and NULL, or a function and its `self`."""
    lower, upper = pair
    if lower is _NULL or upper is _NULL:
        return (upper if lower is _NULL else lower), args
    return lower, [upper, *args]


def _outcome(op: dis.Instruction, operands: Sequence[Value]) -> Value:
    """Return the outcome of a test whose operands are all literals."""
    if not all(isinstance(operand, Constant) for operand in operands):
        return UNKNOWN
    left, right = operands[0].value, operands[-1].value
    match op.opname, op.argval:
        case "TO_BOOL", _:
            return Constant(bool(left))
        case "UNARY_NOT", _:
            return Constant(not left)
        case "IS_OP", inverted:
            return Constant((left is right) != bool(inverted))
        case "CONTAINS_OP", inverted if isinstance(right, (str, tuple, frozenset)) and isinstance(left, str):
            return Constant((left in right) != bool(inverted))
        case "COMPARE_OP", "==" | "!=":
            return Constant((left == right) == (op.argval == "=="))
    return UNKNOWN


def _no_literal(value: Value) -> Value:
    """Return a value for a variable of the code, which is not known to keep a literal."""
    return UNKNOWN if isinstance(value, Constant) else value


@cache
def _stored(code: CodeType) -> frozenset[str]:
    """Return the variables that a function, or one inside of it, stores."""
    stores = (op.argval for op in dis.get_instructions(code) if op.opname.startswith(("STORE_FAST", "STORE_DEREF")))
    names = {name for value in stores for name in (value if isinstance(value, tuple) else (value,))}
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(names.union(*map(_stored, nested)))


def _merged(stack: Sequence[Value], other: Sequence[Value]) -> list[Value]:
    """Return what is known on either of two ways to the same place; a literal must be known on both."""

    def one(a: Value, b: Value) -> Value:
        if a is b or (isinstance(a, Constant) and a == b):
            return a
        known = [value for value in (a, b) if value is not UNKNOWN and not isinstance(value, Constant)]
        return known[0] if known else UNKNOWN

    return list(map(one, stack, other))
