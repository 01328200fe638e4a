//! Checks on the structure of the code: crates depend on each other as `docs/architecture.md` says, and the files of a
//! crate have no circular imports. Imports between a module and its submodules are allowed, because
//! submodules implement parts of a type that the parent owns.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::workspace;

/// Path of a module from the root of its crate.
type Module = Vec<String>;

/// Maximum number of re-exports to follow when resolving a single name.
const REEXPORTS_MAX: usize = 8;

/// Returns the folders of all workspace members.
fn members() -> Vec<PathBuf> {
    let text = fs::read_to_string(workspace().join("Cargo.toml")).unwrap();
    let list = text.split("members = [").nth(1).unwrap().split(']').next().unwrap();
    let members: Vec<_> = list.split('"').skip(1).step_by(2).map(|member| workspace().join(member)).collect();
    assert!(members.len() > 8, "{members:?}");
    members
}

/// Returns the name of a crate and its dependencies in the workspace, excluding dev-dependencies.
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

/// Checks packages with `test = false`, because Cargo would not run their tests.
#[test]
fn packages_excluded_from_testing_contain_no_tests() {
    let is_untested = |member: &PathBuf| {
        fs::read_to_string(member.join("Cargo.toml")).unwrap().contains("\ntest = false\n")
    };
    let untested: Vec<_> = members().into_iter().filter(is_untested).collect();
    assert!(!untested.is_empty());
    for member in untested {
        let mut places = vec![member.join("src/main.rs"), member.join("src/bin")];
        while let Some(place) = places.pop() {
            if place.is_dir() {
                places.extend(fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path()));
            } else if let Ok(text) = fs::read_to_string(&place) {
                assert!(!text.contains("#[test]"), "{} has a test: remove `test = false`", place.display());
            }
        }
    }
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
    // Only fleets need the NATS library.
    assert!(locked_dependencies("bulkhead-fleet").contains("async-nats"));
    assert!(!locked_dependencies("bulkhead-supervisor").contains("async-nats"));
}

/// Returns the names of all packages that a package depends on directly or indirectly, including dev-dependencies.
fn locked_dependencies(package: &str) -> BTreeSet<String> {
    let lock = fs::read_to_string(workspace().join("Cargo.lock")).unwrap();
    let quoted = |line: &str| line.split('"').nth(1).map(|text| text.split(' ').next().unwrap().to_owned());
    let mut dependencies: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in lock.split("[[package]]\n").skip(1) {
        let name = entry.lines().find_map(|line| quoted(line.strip_prefix("name = ")?)).unwrap();
        let list = entry.lines().skip_while(|line| *line != "dependencies = [").filter_map(quoted);
        dependencies.entry(name).or_default().extend(list);
    }
    let (mut found, mut open) = (BTreeSet::new(), vec![package.to_owned()]);
    while let Some(name) = open.pop() {
        open.extend(dependencies[&name].iter().filter(|name| found.insert((*name).clone())).cloned());
    }
    found
}

#[test]
fn changelog_begins_with_current_version() {
    let page = fs::read_to_string(workspace().join("CHANGELOG.md")).unwrap();
    let mut headings = page.lines().filter_map(|line| line.strip_prefix("## "));
    let first = headings.find(|heading| *heading != "Unreleased").unwrap();
    assert_eq!(first.split(' ').next(), Some(env!("CARGO_PKG_VERSION")), "CHANGELOG.md needs an entry");
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

/// Returns the text after the string literal at the start of `from`. The literal is raw if `before` ends with a raw
/// string prefix such as `r#`.
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

    /// Resolves a path used in the module `from` to a module of this crate.
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

    /// Returns the modules from which each module imports names. Ancestors and descendants are not included.
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

/// Returns the paths that a source file imports, and the paths that it uses inline.
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

/// Lists the modules that are part of an import cycle.
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
fn import_check_finds_circular_imports() {
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

// The data plane: parts and wiring.

/// Upper bounds on the complexity of the data plane. If a measured value falls below its bound, the bound must be
/// lowered to this value.
const METHOD_LINES_MAX: usize = 3648;
const VISIBLE_FIELDS_MAX: usize = 90;
const CALLS_BETWEEN_FILES_MAX: usize = 43;
const CALL_CIRCLE_MAX: usize = 7;

/// Returns the module that a module is counted under. This is the top-level ancestor or, below `wiring`, the child of
/// `wiring`.
fn file_of(module: &Module) -> Module {
    let levels = if module.first().is_some_and(|first| first == "wiring") { 2 } else { 1 };
    module.iter().take(levels).cloned().collect()
}

/// Returns the bodies of all blocks that begin with `start`, such as `impl DataPlane {`.
fn blocks<'t>(text: &'t str, start: &str) -> Vec<&'t str> {
    let body = |(at, _): (usize, &str)| {
        let body = &text[at + start.len()..];
        let mut depth = 1;
        let end = body.find(|char| {
            depth += i32::from(char == '{') - i32::from(char == '}');
            depth == 0
        });
        &body[..end.unwrap_or(body.len())]
    };
    text.match_indices(start).map(body).collect()
}

/// Returns all names in the source text that directly follow `start` and are directly followed by `(` or `<`.
fn names_after<'t>(text: &'t str, start: &str) -> Vec<&'t str> {
    let name = |(at, _): (usize, &str)| {
        let rest = text[at + start.len()..].trim_start();
        let end = rest.find(|char: char| !char.is_alphanumeric() && char != '_')?;
        rest[end..].starts_with(['(', '<']).then_some(&rest[..end])
    };
    text.match_indices(start).filter_map(name).collect()
}

/// Returns, for each file of a crate, the other files whose `owner` methods it calls, and the total number of lines in
/// all methods of `owner`. Ignores calls from the crate's root.
fn method_calls(
    files: &BTreeMap<Module, String>,
    owner: &str,
) -> (BTreeMap<Module, BTreeSet<Module>>, usize) {
    let start = format!("impl {owner} {{");
    let bodies: Vec<(Module, String)> =
        files.iter().map(|(module, text)| (file_of(module), blocks(text, &start).concat())).collect();
    let lines = bodies.iter().flat_map(|(_, body)| body.lines()).filter(|line| !line.trim().is_empty());
    let lines = lines.count();
    let mut methods = BTreeMap::new();
    for (file, body) in &bodies {
        methods.extend(names_after(body, "fn ").into_iter().map(|name| (name.to_owned(), file)));
    }
    let mut calls: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (file, body) in bodies.iter().filter(|(file, _)| !file.is_empty()) {
        let compact = body.replace(char::is_whitespace, "");
        let called = ["self.", "Self::"].into_iter().flat_map(|start| names_after(&compact, start));
        let targets = called.filter_map(|name| methods.get(name)).filter(|target| **target != file);
        calls.entry(file.clone()).or_default().extend(targets.map(|target| (*target).clone()));
    }
    (calls, lines)
}

/// Returns the number of files in the largest group of files that call one another directly or indirectly.
fn largest_circle(calls: &BTreeMap<Module, BTreeSet<Module>>) -> usize {
    let reached = |start: &Module| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(file) = open.pop() {
            let next = calls.get(file).into_iter().flatten();
            open.extend(next.filter(|file| seen.insert((*file).clone())));
        }
        seen
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        calls.keys().map(|file| (file, reached(file))).collect();
    let circle = |file: &Module| {
        let is_mutual = |other: &&Module| reached.get(other).is_some_and(|back| back.contains(file));
        reached[file].iter().filter(is_mutual).count()
    };
    calls.keys().map(circle).max().unwrap_or(0)
}

/// Returns the number of struct fields that are visible outside their file, but not outside their crate.
fn visible_fields(text: &str) -> usize {
    let is_visible = |line: &str| {
        let line = line.trim_start();
        let name = line.strip_prefix("pub(super) ").or_else(|| line.strip_prefix("pub(crate) "));
        let name = name.and_then(|rest| rest.split_once(": ")).map(|(name, _)| name);
        name.is_some_and(|name| name.chars().all(|char| char.is_alphanumeric() || char == '_'))
    };
    let tuple = |line: &&str| line.contains("struct ") && line.contains('(') && line.ends_with(");");
    let fields_of_tuple = |line: &str| {
        let fields = line.split_once("struct ").and_then(|(_, rest)| rest.split_once('('));
        fields.map_or(0, |(_, fields)| fields.matches("pub(").count())
    };
    text.lines().filter(|line| is_visible(line)).count()
        + text.lines().filter(tuple).map(fields_of_tuple).sum::<usize>()
}

fn data_plane() -> Imports {
    Imports::of(&workspace().join("supervisor/dataplane"))
}

#[test]
fn data_plane_parts_do_not_refer_to_the_data_plane() {
    for (module, text) in &data_plane().modules {
        let is_wiring = module.first().is_none_or(|first| first == "wiring");
        let mut words = text.split(|char: char| !char.is_alphanumeric() && char != '_');
        assert!(
            is_wiring || words.all(|word| word != "DataPlane"),
            "{} refers to DataPlane",
            module.join("::")
        );
    }
}

#[test]
fn data_plane_files_have_no_circular_imports() {
    let imports = data_plane();
    let mut edges: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, targets) in imports.edges() {
        let file = file_of(module);
        let targets = targets.iter().map(file_of).filter(|target| *target != file && !target.is_empty());
        edges.entry(file.clone()).or_default().extend(targets);
    }
    let edges = edges.iter().map(|(file, targets)| (file, targets.clone())).collect();
    let circles = in_circles(&edges);
    assert!(circles.is_empty(), "\n    {}", circles.join("\n    "));
}

#[test]
fn data_plane_structure_stays_within_recorded_limits() {
    let files = data_plane().modules;
    let (calls, lines) = method_calls(&files, "DataPlane");
    let between = calls.values().map(BTreeSet::len).sum::<usize>();
    let fields: usize = files.values().map(|text| visible_fields(text)).sum();
    let found = [lines, fields, between, largest_circle(&calls)];
    let most = [METHOD_LINES_MAX, VISIBLE_FIELDS_MAX, CALLS_BETWEEN_FILES_MAX, CALL_CIRCLE_MAX];
    let names =
        ["lines in methods of DataPlane", "visible fields", "calls between files", "files in a circle"];
    for ((name, found), most) in names.into_iter().zip(found).zip(most) {
        assert!(found <= most, "{name}: {found}, more than the recorded {most}; calls: {calls:#?}");
        assert!(
            found == most,
            "{name}: {found}, which is better than the recorded {most}: record the new value"
        );
    }
}

#[test]
fn call_check_finds_calls_between_files_of_one_type() {
    let file = |name: &str, text: &str| (vec![name.to_owned()], text.to_owned());
    let wiring = |name: &str, text: &str| (vec!["wiring".to_owned(), name.to_owned()], text.to_owned());
    let files = BTreeMap::from([
        (Vec::new(), "impl P {\n    fn apply(&self) { self.a() }\n}".to_owned()),
        wiring(
            "a",
            "impl P {\n    fn a(&self) {\n        self\n            .b();\n        self.apply()\n    }\n}",
        ),
        wiring("b", "impl P {\n    fn b(&self) { Self::a(self) }\n}\nimpl Q { fn q() { self.a() } }"),
        (
            vec!["wiring".to_owned(), "b".to_owned(), "c".to_owned()],
            "impl P { fn c() { self.b() } }".to_owned(),
        ),
        file("part", "struct Part;"),
    ]);
    let (calls, lines) = method_calls(&files, "P");
    assert_eq!(calls.values().map(BTreeSet::len).sum::<usize>(), 3, "{calls:?}");
    assert_eq!((largest_circle(&calls), lines), (2, 8));
    let fields = "pub(super) struct A {\n    pub(super) a: u8,\n    b: u8,\n}\npub(super) struct B(pub(super) u8, u8);";
    assert_eq!(visible_fields(fields), 2);
}
