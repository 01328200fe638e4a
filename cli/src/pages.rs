//! Generates shell completions and man pages from the definition of the command line.

use std::path::Path;

use clap::CommandFactory;
use serde_json::json;

use crate::args::Args;
use crate::output::{self, Failure, exit};

/// Prints completions for a shell.
pub(crate) fn completions(shell: clap_complete::Shell) -> Result<u8, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "bulkhead", &mut text);
    output::raw(&text)?;
    Ok(exit::OK)
}

/// Writes man pages for the command and each subcommand, and prints their paths.
pub(crate) fn man(args: &Args, folder: &Path) -> Result<u8, Failure> {
    let fail = |error| {
        Failure::new(
            exit::OUTPUT_FAILED,
            format!("failed to write man pages to {}: {error}", folder.display()),
        )
    };
    std::fs::create_dir_all(folder).map_err(fail)?;
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    // `fleet` runs the `bulkhead-fleet` program, which has its own man pages.
    let subcommands = command.get_subcommands().filter(|page| page.get_name() != "fleet").cloned();
    let subcommands = subcommands.collect::<Vec<_>>();
    let mut files = Vec::new();
    for page in std::iter::once(command).chain(subcommands) {
        let page = clap_mangen::Man::new(page);
        let path = folder.join(page.get_filename());
        let mut text = Vec::new();
        page.render(&mut text).and_then(|()| std::fs::write(&path, text)).map_err(fail)?;
        files.push(path.display().to_string());
    }
    if args.json {
        output::json(json!({"files": files}))?;
    } else {
        files.iter().try_for_each(|file| output::line(file))?;
    }
    Ok(exit::OK)
}
