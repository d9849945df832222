"""Finds circles of imports between the files of a crate.

A file imports the file that defines a name it uses, no matter through which module the name is
re-exported. A module consists of the files below it in the tree, so its use of them is no import;
their use of the module is one. Items and modules under `#[cfg(test)]` are left out.
"""
import collections
import re

TOKEN = re.compile(
    r"""(?://[^\n]*|/\*.*?\*/|\b[cb]?r(?P<h>\#*)".*?"(?P=h)|"(?:[^"\\]|\\.)*"|'(?:[^'\\\n]|\\[^\n]+?)'|'\w+)"""
    r"""|(?P<token>\w+|::|\S)""",
    re.S,
)
TEST_ONLY = re.compile(r"#\[cfg\((all\()?test[,)]")
NAME = re.compile(r"[A-Za-z_]\w*$")
CLOSING = {"{": "}", "(": ")", "[": "]"}
DEFINES = {"fn", "struct", "enum", "trait", "type", "const", "static", "union"}
ITEMS = DEFINES | {"pub", "impl", "mod", "use", "unsafe", "async", "extern", "macro_rules"}

Use = collections.namedtuple("Use", "path is_public")


def is_below(file, parent):
    """Whether `file` belongs to a module below that of `parent`."""
    is_root = parent.name in ("mod.rs", "lib.rs", "main.rs")
    return (parent.parent if is_root else parent.with_suffix("")) in file.parents


def end_of_group(code, at):
    """Returns the index behind the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] in CLOSING) - (code[i] in CLOSING.values())
        if depth == 0:
            return i + 1
    return len(code)


def end_of_item(code, at):
    """Returns the index behind the item, field or statement that begins at `at`."""
    while code[at] == "#" and code[at + 1] == "[":
        at = end_of_group(code, at + 1)
    is_item, is_use = code[at] in ITEMS, False
    while at < len(code):
        is_use = is_use or code[at] == "use"
        if code[at] in CLOSING:
            is_body = code[at] == "{" and is_item and not is_use
            at = end_of_group(code, at)
            if is_body:
                break
        elif code[at] == ";" or (code[at] == "," and not is_item):
            return at + 1
        elif code[at] in CLOSING.values():
            break
        else:
            at += 1
    return at


def use_tree(code, at, prefix):
    """Returns the imports of the tree at `at`, as pairs of a name and its path, and the index behind it."""
    path = prefix
    while code[at] not in (";", ",", "}"):
        if code[at] == "{":
            pairs, at = [], at + 1
            while code[at] != "}":
                found, at = use_tree(code, at, path)
                pairs += found
                at += code[at] == ","
            return pairs, at + 1
        if code[at] == "*":
            return [("*", path)], at + 1
        if code[at] == "as":
            return [(code[at + 1], path)], at + 2
        if NAME.match(code[at]) and not (code[at] == "self" and path):
            path += (code[at],)
        at += 1
    return [(path[-1], path)], at


def is_public_use(code, at):
    """Whether `pub`, perhaps with the scope in brackets, stands before the `use` at `at`."""
    if at and code[at - 1] == ")":
        while code[at - 1] != "(":
            at -= 1
        at -= 1
    return at > 0 and code[at - 1] == "pub"


class Module:
    """The names in the scope of a module, and the names that its code uses."""

    def __init__(self, file, path):
        self.file, self.path = file, path
        self.children, self.uses, self.globs = {}, {}, []
        self.items = set()
        # Paths of two or more names, first names of paths, and macros that are called.
        self.paths, self.words, self.calls = set(), set(), set()


class Crate:
    """The modules below one crate root."""

    def __init__(self, root):
        self.modules = []
        self.macros = collections.defaultdict(set)
        self.root = self.read_file(root, root.parent, ())

    def read_file(self, file, folder, path):
        module = Module(file, path)
        self.read([m["token"] for m in TOKEN.finditer(file.read_text()) if m["token"]], module, folder)
        return module

    def read(self, code, module, folder):
        """Reads the tokens of a module's body; `folder` holds the files of its children."""
        self.modules.append(module)
        code = ["", *code, "", "", ""]
        at = 1
        while at < len(code) - 3:
            word, after = code[at], code[at + 1]
            if word == "#" and after in ("[", "!"):
                end = end_of_group(code, at + 1 + (after == "!"))
                # Other attributes are read as code: they name functions.
                at = end_of_item(code, end) if TEST_ONLY.match("".join(code[at:end])) else at + 2
            elif word == "mod" and code[at + 2] == ";":
                flat = folder / f"{after}.rs"
                file = flat if flat.is_file() else folder / after / "mod.rs"
                module.children[after] = self.read_file(file, folder / after, (*module.path, after))
                at += 3
            elif word == "mod" and code[at + 2] == "{":
                end = end_of_group(code, at + 2)
                module.children[after] = Module(module.file, (*module.path, after))
                self.read(code[at + 3 : end - 1], module.children[after], folder / after)
                at = end
            elif word == "use" and after != "<":
                is_public = is_public_use(code, at)
                pairs, at = use_tree(code, at + 1, ())
                for name, path in pairs:
                    if name == "*":
                        module.globs.append(Use(path, is_public))
                    else:
                        module.uses[f"_{len(module.uses)}" if name == "_" else name] = Use(path, is_public)
            elif word == "macro_rules" and after == "!":
                self.macros[code[at + 2]].add(module.file)
                at += 3
            elif NAME.match(word) and code[at - 1] != "::":
                at = self.read_name(code, at, module)
            else:
                at += 1

    def read_name(self, code, at, module):
        """Reads the path or single name at `at`, and returns the index behind it."""
        before, path = code[at - 1], [code[at]]
        while code[at + 1] == "::" and NAME.match(code[at + 2]):
            path.append(code[at + 2])
            at += 2
        if before in DEFINES:
            module.items.add(path[0])
        elif before != ".":
            module.words.add(path[0])
            if len(path) > 1:
                module.paths.add(tuple(path))
            elif code[at + 1] == "!":
                module.calls.add(path[0])
        return at + 1

    def absolute(self, module, path, seen=()):
        """Returns the path from the crate root; `None` for names of other crates and of no module."""
        first, rest = path[0], path[1:]
        if first == "crate":
            return rest
        if first == "self":
            return self.absolute(module, rest) if rest[:1] == ("super",) else module.path + rest
        if first == "super":
            above = module.path[:-1]
            while rest[:1] == ("super",):
                above, rest = above[:-1], rest[1:]
            return above + rest
        if first in module.children:
            return module.path + path
        if first in module.uses and first not in seen:
            head = self.absolute(module, module.uses[first].path, (*seen, first))
            return None if head is None else head + rest
        return None

    def defining_file(self, path, seen=(), default=True):
        """Returns the file that defines the item at `path`; `None` for a module and for names of other crates."""
        module = self.root
        for i, name in enumerate(path):
            if name in module.children:
                module = module.children[name]
                continue
            if (module, name) in seen:
                return None
            seen = (*seen, (module, name))
            if name in module.uses:
                target = self.absolute(module, module.uses[name].path, (name,))
                return None if target is None else self.defining_file(target + path[i + 1 :], seen)
            if name in module.items:
                return module.file
            for glob in module.globs:
                target = self.absolute(module, glob.path)
                file = target is not None and self.defining_file((*target, name), seen, default=False)
                if file:
                    return file
            if len(self.macros.get(name, ())) == 1:
                return next(iter(self.macros[name]))
            return module.file if default else None
        return None

    def imports(self):
        """Yields (file, imported file, name)."""
        for module in self.modules:
            paths = set(module.paths)
            for name, use in module.uses.items():
                if not use.is_public or name in module.words:
                    paths.add(use.path)
            for path in paths:
                target = self.absolute(module, path)
                file = target is not None and self.defining_file(target)
                if file:
                    yield module.file, file, "::".join(target)
            for glob in module.globs:
                target = self.absolute(module, glob.path)
                for word in module.words if target is not None and not glob.is_public else ():
                    file = self.defining_file((*target, word), default=False)
                    if file:
                        yield module.file, file, "::".join((*target, word))
            for name in module.calls:
                files = self.macros.get(name, ())
                if len(files) == 1:
                    yield module.file, next(iter(files)), f"{name}!"


def circles(roots):
    """Returns the circles of files below the crate roots, the longest first, and the imported names by pair of files."""
    names = collections.defaultdict(set)
    for root in roots:
        for file, imported, name in Crate(root).imports():
            if file != imported and not is_below(imported, file):
                names[file, imported].add(name)
    direct = collections.defaultdict(set)
    for file, imported in names:
        direct[file].add(imported)
    reach = {}
    for file in list(direct):
        reach[file], todo = set(), [file]
        while todo:
            new = direct[todo.pop()] - reach[file]
            reach[file] |= new
            todo += new
    found = {frozenset(f for f in reach[file] if file in reach.get(f, ())) for file in reach if file in reach[file]}
    return sorted((sorted(circle) for circle in found), key=lambda circle: (-len(circle), circle)), names
