//! Checks on the structure of the code: crates depend on each other as `docs/architecture.md` says, and the files of a
//! crate have no circular imports. Imports between a module and its submodules are allowed, because
//! submodules implement parts of a type that the parent owns.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::workspace;

/// Path of a module from the root of its crate.
type Module = Vec<String>;

/// Maximum number of re-exports to follow from one name.
const REEXPORTS_MAX: usize = 8;

/// Returns the folders of the workspace's members.
fn members() -> Vec<PathBuf> {
    let text = fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
    let list = text.split("members = [").nth(1).unwrap().split(']').next().unwrap();
    let members: Vec<_> = list.split('"').skip(1).step_by(2).map(|member| workspace().join(member)).collect();
    assert!(members.len() > 8, "{members:?}");
    members
}

/// Returns the name of a crate and its dependencies in the workspace, without dev-dependencies.
fn dependencies(member: &Path) -> (String, BTreeSet<String>) {
    let text = fs::read_to_string(member.join("Cargo.toml")).unwrap();
    let mut section = "";
    let mut name = String::new();
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[package]" && line.starts_with("name") {
            name = line.split('"').nth(1).unwrap().to_owned();
        } else if section == "[dependencies]" {
            let crate_name = line.split(['.', ' ', '=']).next().unwrap();
            found.extend(crate_name.strip_prefix("bulkhead-").map(str::to_owned));
        }
    }
    (name.strip_prefix("bulkhead-").unwrap().to_owned(), found)
}

#[test]
fn crate_dependencies_match_documentation() {
    let page = fs::read_to_string(workspace().join("docs/architecture.md")).unwrap();
    let section = page.split("\n## Crates\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut told = BTreeMap::new();
    let mut above = BTreeSet::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells[0].trim_matches('`').to_owned();
        let names: BTreeSet<_> = cells[2]
            .split(',')
            .map(|name| name.trim().trim_matches('`').to_owned())
            .filter(|n| n != "–")
            .collect();
        assert!(names.is_subset(&above), "{name} depends on a crate further down in the table: {names:?}");
        above.insert(name.clone());
        told.insert(name, names);
    }
    let found: BTreeMap<_, _> = members().iter().map(|member| dependencies(member)).collect();
    assert_eq!(found, told, "left: Cargo.toml, right: docs/architecture.md");
}

/// Removes comments, literals and tests from source text.
fn bare(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['/', '"', '\'']) {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        rest = if from.starts_with("//") {
            from.find('\n').map_or("", |end| &from[end..])
        } else if let Some(after) = from.strip_prefix("'\"'") {
            after
        } else if from.starts_with('"') {
            after_text(before, from)
        } else {
            out.push_str(&from[..1]);
            &from[1..]
        };
    }
    out + rest
}

/// Returns the text after a string literal, which can be a raw string.
fn after_text<'t>(before: &str, from: &'t str) -> &'t str {
    let hashes = before.len() - before.trim_end_matches('#').len();
    if before.trim_end_matches('#').ends_with('r') {
        let end = format!("\"{}", "#".repeat(hashes));
        return from[1..].find(&end).map_or("", |at| &from[1 + at + end.len()..]);
    }
    let mut is_escaped = false;
    for (at, byte) in from.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return &from[at + 1..],
            _ => {}
        }
    }
    ""
}

/// Collects the modules and sources of a crate, except tests and additional binaries.
fn modules(folder: &Path, root: &Path, into: &mut BTreeMap<Module, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if name == "tests" || path == root.join("bin") {
            continue;
        }
        if path.is_dir() {
            modules(&path, root, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let below = folder.strip_prefix(root).unwrap();
            let mut module: Module = below.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if !matches!(&*name, "mod" | "lib" | "main") {
                module.push(name);
            }
            into.entry(module).or_default().push_str(&bare(&fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Expands a use tree such as `a::{b, c::{self, d as e}}` into paths.
fn paths(tree: &str) -> Vec<Module> {
    let tree = tree.trim();
    let Some((before, within)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap().trim();
        return vec![path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()];
    };
    let within = within.trim_end().strip_suffix('}').unwrap_or(within);
    let before: Module = before.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, char) in within.char_indices() {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&within[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&within[start..]);
    let parts = parts.into_iter().filter(|part| !part.trim().is_empty());
    let ends = parts.flat_map(paths).map(|end| end.into_iter().filter(|part| part != "self"));
    ends.map(|end| before.iter().cloned().chain(end).collect()).collect()
}

/// The modules and sources of a crate, and the names that each module imports or re-exports.
struct Imports {
    modules: BTreeMap<Module, String>,
    reexports: BTreeMap<Module, BTreeMap<String, Module>>,
}

impl Imports {
    fn of(member: &Path) -> Self {
        let mut found = BTreeMap::new();
        modules(&member.join("src"), &member.join("src"), &mut found);
        let mut reexports: BTreeMap<Module, BTreeMap<String, Module>> = BTreeMap::new();
        for (module, text) in &found {
            let uses = uses(text).0.into_iter().filter_map(|path| Some((path.last()?.clone(), path)));
            reexports.insert(module.clone(), uses.collect());
        }
        Self { modules: found, reexports }
    }

    /// Returns the module of this crate that a path in the module `from` refers to.
    fn target(&self, from: &Module, path: &[String], left: usize) -> Option<Module> {
        let (mut at, mut rest) = match path.first()?.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (from.clone(), &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|part| *part == "super").count();
                (from[..from.len().checked_sub(ups)?].to_vec(), &path[ups..])
            }
            first => {
                let child: Module = from.iter().cloned().chain([first.to_owned()]).collect();
                self.modules.contains_key(&child).then_some((child, &path[1..]))?
            }
        };
        while let Some((first, others)) = rest.split_first() {
            let child: Module = at.iter().cloned().chain([first.clone()]).collect();
            if !self.modules.contains_key(&child) {
                break;
            }
            (at, rest) = (child, others);
        }
        if let Some(first) = rest.first()
            && let Some(named) = self.reexports.get(&at).and_then(|names| names.get(first))
            && left > 0
        {
            return self.target(&at, named, left - 1).or(Some(at));
        }
        Some(at)
    }

    /// Returns the imports of each module, except from ancestors and descendants.
    fn edges(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let mut edges = BTreeMap::new();
        for (module, text) in &self.modules {
            let (uses, inline) = uses(text);
            let paths = uses.iter().chain(&inline);
            let targets = paths.filter_map(|path| self.target(module, path, REEXPORTS_MAX));
            let others = targets.filter(|to| !to.starts_with(module) && !module.starts_with(to));
            edges.insert(module, others.collect());
        }
        edges
    }
}

/// Returns the paths that a source imports, and the paths that appear inline.
fn uses(text: &str) -> (Vec<Module>, Vec<Module>) {
    let mut imported = Vec::new();
    let mut rest = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let start = line.trim_start();
        let start = match start.strip_prefix("pub") {
            Some(after) if after.starts_with('(') => {
                after.split_once(')').map_or("", |(_, after)| after).trim_start()
            }
            Some(after) => after.trim_start(),
            None => start,
        };
        let Some(tree) = start.strip_prefix("use ") else {
            rest.push_str(line);
            rest.push('\n');
            continue;
        };
        let mut tree = tree.to_owned();
        while !tree.contains(';') {
            tree.push_str(lines.next().unwrap_or(";"));
        }
        imported.extend(paths(tree.split(';').next().unwrap()));
    }
    let is_name = |char: char| char.is_alphanumeric() || char == '_' || char == ':';
    let words = rest.split(|char| !is_name(char));
    let inline =
        words.filter(|word| ["crate::", "super::", "self::"].iter().any(|start| word.starts_with(start)));
    (imported, inline.flat_map(paths).collect())
}

/// Lists the modules that import themselves through other modules.
fn in_circles(edges: &BTreeMap<&Module, BTreeSet<Module>>) -> Vec<String> {
    let reached = |start: &Module| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start.clone()]);
        while let Some(module) = open.pop() {
            for next in edges.get(&module).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    open.push(next.clone());
                }
            }
        }
        seen
    };
    let circles = edges.keys().filter(|module| reached(module).contains(**module));
    circles.map(|module| format!("{} → {:?}", module.join("::"), edges[module])).collect()
}

#[test]
fn modules_have_no_circular_imports() {
    for member in members() {
        let circles = in_circles(&Imports::of(&member).edges());
        assert!(circles.is_empty(), "{}:\n    {}", member.display(), circles.join("\n    "));
    }
}

#[test]
fn check_finds_circular_imports() {
    let crate_of = |files: &[(&str, &str)]| {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let path = folder.path().join("src").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        in_circles(&Imports::of(folder.path()).edges())
    };
    let plain = [
        ("lib.rs", "mod a;\nmod b;"),
        ("a.rs", "use crate::b::B;"),
        ("b.rs", "use super::{a::{self, A}, c};"),
    ];
    assert_eq!(crate_of(&plain).len(), 2);
    let by_reexport =
        [("lib.rs", "pub use a::A;"), ("a.rs", "use crate::b;"), ("b.rs", "fn f() -> crate::A {}")];
    assert_eq!(crate_of(&by_reexport).len(), 2);
    let parts = [("lib.rs", "mod a;"), ("a.rs", "mod b;\nuse b::B;"), ("a/b.rs", "use super::A;")];
    assert!(crate_of(&parts).is_empty(), "imports between a parent and its submodule are allowed");
    let quoted = [("a.rs", "// crate::b\nconst B: &str = \"crate::b\";"), ("b.rs", "use crate::a::A;")];
    assert!(crate_of(&quoted).is_empty());
    let tested = [("a.rs", "#[cfg(test)]\nmod tests {\n    use crate::b;\n}"), ("b.rs", "use crate::a::A;")];
    assert!(crate_of(&tested).is_empty());
}
