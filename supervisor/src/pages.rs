//! Implements `bulkhead-supervisor man`: writes man pages for the supervisor and its subcommands, the host program, and
//! the configuration file. The pages are generated from the command line definition and the declared keys.

use std::io;
use std::path::{Path, PathBuf};

use bulkhead_config::{Key, reference};
use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use crate::args::Args;

/// Manual section of the programs: section 8, system administration.
const SECTION: &str = "8";

/// Writes all man pages to a folder, which is created if it does not exist. Returns the paths of the man pages.
pub fn write(folder: &Path) -> io::Result<Vec<PathBuf>> {
    std::fs::create_dir_all(folder)?;
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    let subcommands: Vec<_> = command.get_subcommands().cloned().collect();
    let programs = std::iter::once(command).chain(subcommands);
    let mut files: Vec<PathBuf> = programs
        .map(|page| Man::new(page).section(SECTION).generate_to(folder))
        .collect::<io::Result<_>>()?;
    for (name, page) in [("bulkhead-worker.8", worker_page()), ("workers.toml.5", configuration_page())] {
        let path = folder.join(name);
        std::fs::write(&path, page.render())?;
        files.push(path);
    }
    Ok(files)
}

fn page(name: &str, section: &str, about: &str) -> Roff {
    let mut page = Roff::new();
    page.control("TH", [name, section, "", concat!("bulkhead ", env!("CARGO_PKG_VERSION"))]);
    page.control("SH", ["NAME"]).text([roman(format!("{name} - {about}"))]);
    page
}

/// Adds a section with the given paragraphs to a man page.
fn section(page: &mut Roff, heading: &str, paragraphs: &[&str]) {
    page.control("SH", [heading]);
    for (index, paragraph) in paragraphs.iter().enumerate() {
        if index > 0 {
            page.control("PP", []);
        }
        page.text(inlines(paragraph));
    }
}

/// Adds a section with the given preformatted lines to a man page.
fn example(page: &mut Roff, heading: &str, lines: &str) {
    page.control("SH", [heading]).control("nf", []);
    for line in lines.lines() {
        page.text([roman(line)]);
    }
    page.control("fi", []);
}

fn worker_page() -> Roff {
    let mut page = page("bulkhead-worker", SECTION, "runs the workers of `exec` and `library` bulkheads");
    section(
        &mut page,
        "DESCRIPTION",
        &[
            "The supervisor starts this program for each worker of a bulkhead with `exec` or `library`. With `exec`, it \
             starts a program for each job. With `library`, it loads a C library and calls a function for each job.",
            "You never need to start this program. The supervisor looks for the program in its own directory, and then in \
             PATH.",
        ],
    );
    section(
        &mut page,
        "EXIT STATUS",
        &["2 if the program was not started by a supervisor. Any other status is that of the worker."],
    );
    section(&mut page, "SEE ALSO", &["`bulkhead-supervisor`(8), `workers.toml`(5)"]);
    page
}

const EXAMPLE: &str = "\
[supervisor]
socket = \"/run/bulkhead/jobs.sock\"

[bulkhead.upper]
exec          = [\"tr\", \"a-z\", \"A-Z\"]
max_in_flight = 2
max_queue     = 10
deadline      = \"5s\"";

fn configuration_page() -> Roff {
    let mut page = page("workers.toml", "5", "configuration of bulkhead-supervisor");
    section(
        &mut page,
        "DESCRIPTION",
        &[
            "A TOML file that defines the bulkheads of a supervisor and their limits. `bulkhead-supervisor --check` verifies the \
             file, and prints it with all defaults. `bulkhead reload` applies a changed file without losing a job.",
            "Durations are strings such as \"500ms\" or \"1m 30s\". Sizes are strings such as \"64KiB\", or numbers of \
             bytes. Relative paths start at the directory of the file that contains them.",
        ],
    );
    section(
        &mut page,
        "FILES",
        &[
            "`/etc/bulkhead/workers.toml`: the configuration file of root. Other users have \
             `~/.config/bulkhead/workers.toml`. To use another file, set `--config` or the \
             `BULKHEAD_CONFIG` environment variable.",
            "`conf.d/*.toml`, next to the configuration file: further files with [bulkhead.NAME] and [[access]], in the \
             order of their names. They must not be writable by any user except root and the supervisor's user.",
        ],
    );
    example(&mut page, "EXAMPLE", EXAMPLE);
    let mut table = None;
    for key in reference() {
        if table != Some(key.table) {
            table = Some(key.table);
            page.control("SH", [&*heading(key.table)]);
        }
        add_key(&mut page, &key);
    }
    section(
        &mut page,
        "SEE ALSO",
        &["`bulkhead`(1), `bulkhead-supervisor`(8), and configuration.md in the documentation"],
    );
    page
}

/// Returns the heading of a table as it is written in the configuration file.
fn heading(table: &str) -> String {
    if table == "access" { format!("[[{table}]]") } else { format!("[{table}]") }
}

fn add_key(page: &mut Roff, key: &Key) {
    page.control("TP", []).text([bold(key.name)]);
    page.text(inlines(&format!("{} Value: {}. Default: {}.", key.about, key.kind, key.default)));
}

/// Converts text with Markdown code spans and links. Code becomes bold. A link becomes its text, or the name of a
/// section if it points into the same page.
fn inlines(text: &str) -> Vec<Inline> {
    let text = without_links(text);
    let parts = text.split('`').enumerate().filter(|(_, part)| !part.is_empty());
    parts.map(|(index, part)| if index % 2 == 1 { bold(part) } else { roman(part) }).collect()
}

fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, name, target, after)) = split_link(rest) {
        plain.push_str(before);
        plain.push_str(if name == "below" { target.trim_start_matches('#') } else { name });
        if name == "below" {
            plain.push_str(" in configuration.md");
        }
        rest = after;
    }
    plain + rest
}

/// Splits text at its first link. Returns the text before the link, the link's name and target, and the text after it.
fn split_link(text: &str) -> Option<(&str, &str, &str, &str)> {
    let (before, target) = text.split_once("](")?;
    let (before, name) = before.rsplit_once('[')?;
    let (target, after) = target.split_once(')')?;
    Some((before, name, target, after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn man_pages_cover_all_programs_and_keys() {
        let folder = tempfile::tempdir().unwrap();
        let files = write(&folder.path().join("man")).unwrap();
        let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let names: Vec<_> = files.iter().map(name).collect();
        let expected = [
            "bulkhead-supervisor.8",
            "bulkhead-supervisor-doctor.8",
            "bulkhead-supervisor-man.8",
            "bulkhead-worker.8",
            "workers.toml.5",
        ];
        assert_eq!(names, expected);
        let text = |index: usize| std::fs::read_to_string(&files[index]).unwrap();
        assert!(
            text(0).contains(".TH bulkhead\\-supervisor 8") || text(0).contains(".TH bulkhead-supervisor 8")
        );
        assert!(text(0).contains("conf.d"), "the page describes --config");
        let page = text(4);
        for key in reference() {
            assert!(page.contains(&format!("\\fB{}\\fR", key.name.replace('-', "\\-"))), "{}", key.path());
        }
        assert!(!page.contains("](") && !page.contains('`'), "no Markdown is left");
    }

    #[test]
    fn man_page_example_is_valid() {
        bulkhead_config::parse(EXAMPLE, Path::new("/etc/bulkhead/workers.toml")).unwrap();
    }

    #[test]
    fn links_are_replaced_with_text() {
        let text = "See [the protocol](protocol.md); see [below](#fork). Done [here].";
        assert_eq!(without_links(text), "See the protocol; see fork in configuration.md. Done [here].");
        assert_eq!(inlines("`a` b"), [bold("a"), roman(" b")]);
    }
}
