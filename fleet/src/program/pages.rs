//! Implements `bulkhead-fleet man`, which generates man pages from the command line definition.

use std::io;
use std::path::Path;

use clap::CommandFactory;
use clap_mangen::Man;

use super::args::Args;
use super::output::{self, Failure, exit};

/// Writes a man page for each command, and prints their paths.
pub(crate) fn write(folder: &Path) -> Result<u8, Failure> {
    let fail = |error: io::Error| {
        Failure::new(
            exit::OUTPUT_FAILED,
            format!("failed to write man pages to {}: {error}", folder.display()),
        )
    };
    std::fs::create_dir_all(folder).map_err(fail)?;
    let mut root = Args::command().disable_help_subcommand(true);
    root.build();
    let mut commands = vec![root];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands().filter(|command| !command.is_hide_set()).cloned());
        let file = Man::new(command).section("8").generate_to(folder).map_err(fail)?;
        output::line(&file.display().to_string())?;
    }
    Ok(exit::OK)
}
