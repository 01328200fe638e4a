//! Checks the links in the repository: between pages, to headings, and from code and messages to pages. Links to other
//! sites are not checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use super::workspace;

/// Extensions of source files, whose comments and messages can refer to documentation pages.
const CODE: [&str; 11] = ["c", "cfg", "h", "html", "js", "py", "rs", "service", "sh", "toml", "yml"];

/// Collects all files below a folder, except those in hidden folders, build output and vendored projects.
fn files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let is_foreign =
            ["target", "vendor", "node_modules", "__pycache__"].iter().any(|other| *other == name);
        let kind = entry.file_type().unwrap();
        if kind.is_dir() && !is_foreign && !name.to_string_lossy().starts_with('.') {
            files(&path, into);
        } else if kind.is_file() {
            into.push(path);
        }
    }
}

fn has_ending(path: &Path, endings: &[&str]) -> bool {
    path.extension().and_then(|ending| ending.to_str()).is_some_and(|ending| endings.contains(&ending))
}

/// Removes code blocks and code spans from a page.
fn prose(page: &str) -> String {
    let mut fence = None;
    let mut out = String::with_capacity(page.len());
    for line in page.lines() {
        let marker = ["```", "~~~"].into_iter().find(|marker| line.trim_start().starts_with(marker));
        match (fence, marker) {
            (None, Some(marker)) => fence = Some(marker),
            (Some(open), Some(marker)) if open == marker => fence = None,
            (Some(_), _) => {}
            (None, None) => {
                // Every other part is a code span. An unclosed span at the end of the line is text.
                let parts: Vec<_> = line.split('`').collect();
                for (at, part) in parts.iter().enumerate() {
                    if at % 2 == 0 || at + 1 == parts.len() {
                        out.push_str(part);
                    }
                }
            }
        }
        out.push('\n');
    }
    out
}

/// Returns the link targets in a page, from Markdown and HTML.
fn targets(page: &str) -> BTreeSet<String> {
    let text = prose(page);
    let after = |start: &'static str, ends: &'static [char]| {
        text.split(start).skip(1).filter_map(move |rest| rest.split(ends).next())
    };
    let inline = after("](", &[')', ' ', '\n']);
    let html = after("href=\"", &['"']).chain(after("src=\"", &['"']));
    let defined = text.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    let defined = defined.filter_map(|(_, target)| target.split_whitespace().next());
    inline.chain(html).chain(defined).map(|target| target.trim_matches(['<', '>']).to_owned()).collect()
}

/// Returns the anchors of a page. These are the anchors that GitHub derives from headings, and all `id` attributes
/// in HTML.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut counts = BTreeMap::<String, usize>::new();
    let mut found = BTreeSet::new();
    let mut is_code = false;
    for line in page.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#');
        if !is_code && title.len() < line.len() && title.starts_with(' ') {
            let anchor = anchor(title.trim());
            let count = counts.entry(anchor.clone()).or_default();
            found.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
            *count += 1;
        }
        found
            .extend(line.split("id=\"").skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned));
    }
    found
}

/// Returns the anchor of a heading. A link in the heading is replaced with its text.
fn anchor(title: &str) -> String {
    let mut text = String::new();
    let mut rest = title;
    while let Some((before, from)) = rest.split_once("](") {
        text.push_str(before);
        rest = from.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let kept = text.chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|char| if char == ' ' { '-' } else { char }).collect()
}

/// Resolves the components `.` and `..` of a path without accessing the file system.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(out.pop()),
            part => out.push(part),
        }
    }
    out
}

/// Returns an error message if a link target does not exist. The target's path can be relative to any of `folders`.
fn problem(target: &str, folders: &[&Path], page: Option<&Path>) -> Option<String> {
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let file = if path.is_empty() {
        page.map(Path::to_owned)
    } else {
        folders.iter().map(|folder| normal(&folder.join(path))).find(|file| file.exists())
    };
    let Some(file) = file else { return Some(format!("{target}: no such file")) };
    let anchor = anchor.filter(|_| has_ending(&file, &["md"]))?;
    let is_there = anchors(&fs::read_to_string(&file).unwrap()).contains(anchor);
    (!is_there).then(|| format!("{target}: {} has no such heading", file.display()))
}

#[test]
fn page_links_have_existing_targets() {
    let mut all = Vec::new();
    files(&workspace(), &mut all);
    let pages: Vec<_> = all.iter().filter(|path| has_ending(path, &["md"])).collect();
    assert!(pages.len() > 10, "{pages:?}");
    let mut broken = Vec::new();
    for page in pages {
        let folder = page.parent().unwrap();
        let is_local = |target: &&String| !target.contains("://") && !target.starts_with("mailto:");
        for target in targets(&fs::read_to_string(page).unwrap()).iter().filter(is_local) {
            broken.extend(
                problem(target, &[folder], Some(page)).map(|why| format!("{}: {why}", page.display())),
            );
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The pages are in the Debian package, so the files in `deploy` that they refer to must be in the package as well.
#[test]
fn package_contains_deployment_files_that_its_pages_link_to() {
    let root = workspace();
    let assets = fs::read_to_string(root.join("supervisor/Cargo.toml")).unwrap();
    let mut all = Vec::new();
    files(&root.join("docs"), &mut all);
    all.extend(fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()));
    let mut linked = BTreeSet::new();
    for page in all.iter().filter(|path| has_ending(path, &["md"])) {
        let folder = page.parent().unwrap();
        for target in targets(&fs::read_to_string(page).unwrap()) {
            let file = normal(&folder.join(target));
            linked.extend(
                file.strip_prefix(&root).ok().filter(|file| file.starts_with("deploy")).map(Path::to_owned),
            );
        }
    }
    assert!(linked.len() > 5, "{linked:?}");
    for file in linked {
        let folder = file.parent().unwrap().display().to_string();
        let ending = file.extension().map_or(String::new(), |ending| format!(".{}", ending.display()));
        let sources = [file.display().to_string(), format!("{folder}/*"), format!("{folder}/*{ending}")];
        let is_packaged = |source: &String| {
            assets.contains(&format!("[\"../{source}\", \"usr/share/doc/bulkhead/{folder}/\", \"644\"]"))
        };
        assert!(sources.iter().any(is_packaged), "{} is not in the package", file.display());
    }
}

/// Returns the documentation pages that a source file refers to, with their anchors.
fn named_pages(text: &str) -> BTreeSet<&str> {
    let is_part = |char: char| char.is_ascii_alphanumeric() || "/._#-".contains(char);
    let words = text.split(|char| !is_part(char)).map(|word| word.trim_end_matches(['.', '#', '-']));
    let is_page = |word: &&str| {
        let path = word.split('#').next().unwrap();
        path.ends_with(".md") && path.rsplit('/').next() != Some(".md")
    };
    words.filter(is_page).collect()
}

/// The path of a page can be relative to the source file that names the page, to the repository, or to `docs`, as in
/// the tables that tests generate.
#[test]
fn pages_named_in_code_and_messages_exist() {
    let root = workspace();
    let docs = root.join("docs");
    let mut sources = Vec::new();
    files(&root, &mut sources);
    sources.retain(|path| has_ending(path, &CODE) && !path.ends_with(file!()));
    let mut broken = Vec::new();
    let mut named = 0;
    for source in &sources {
        let Ok(text) = fs::read_to_string(source) else { continue };
        let folder = source.parent().unwrap();
        for page in named_pages(&text) {
            named += 1;
            // A path in `concat!` follows the path of another folder, so only the part from `docs/` onwards counts.
            let page = page.find("docs/").map_or(page, |at| &page[at..]);
            broken.extend(
                problem(page, &[folder, &root, &docs], None)
                    .map(|why| format!("{}: {why}", source.display())),
            );
        }
    }
    assert!(named > 10, "{named} pages are named in {} files", sources.len());
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn link_check_finds_broken_links() {
    let folder = tempfile::tempdir().unwrap();
    let page = "# A `b` & [c](d.md)\n## Twice\n## Twice\n```\n# no heading, [no](link.md)\n```\n`[no](link.md)`\n\
                [x](#a-b--c) [y](#twice-1) <a id=\"here\" href=\"#here\">\n[z]: other.md#there\n";
    fs::write(folder.path().join("page.md"), page).unwrap();
    let wanted = ["#a-b--c", "#twice-1", "#here", "d.md", "other.md#there"];
    assert_eq!(targets(page), wanted.map(str::to_owned).into());
    let file = folder.path().join("page.md");
    let problem = |target: &str| problem(target, &[folder.path()], Some(&file));
    for target in ["#a-b--c", "#twice", "#twice-1", "#here", "page.md", "./page.md#here"] {
        assert_eq!(problem(target), None);
    }
    for target in ["#twice-2", "#no-heading-nolinkmd", "other.md", "page.md#there"] {
        assert!(problem(target).is_some(), "{target}");
    }
    let code = "// see `docs/a.md#b`.\n\"../docs/c.md\" \"x.md.\" \".md\"";
    assert_eq!(named_pages(code), ["../docs/c.md", "docs/a.md#b", "x.md"].into());
}
