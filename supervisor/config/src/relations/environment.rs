//! Checks the environment of workers when the configuration is read, that is, the total size and the files in
//! `env_files`. Returns only the paths of these files, and resolves credentials of systemd. The keeper reads the values
//! again each time it starts a worker or a template.

use std::path::PathBuf;

use bulkhead_linux::secret_file;

use super::Checker;
use crate::diagnostics::shown;
use crate::file::RawBulkhead;
use crate::reader::{Environment, Field, Given};
use crate::values::ValueError;
use crate::{defaults, programs, units};

/// Prefix of a value in `env_files` that names a credential of the supervisor's systemd unit.
const CREDENTIAL: &str = "credential:";

/// Returns the variables in a table, sorted by name.
pub(super) fn texts(field: &Field<Environment>) -> Vec<(String, String)> {
    let variables = field.given().into_iter().flat_map(|given| &given.value);
    variables.map(|(name, given)| (name.clone(), given.value.clone())).collect()
}

impl Checker<'_> {
    /// Checks the total size of arguments and environment variables. The maximum leaves room below the kernel's limit
    /// for variables that describe a job. If the value of a variable comes from a file, the path of the file is counted
    /// instead of the value.
    pub(super) fn check_argument_bytes(&mut self, raw: &RawBulkhead) {
        let given = raw.command.given().or(raw.exec.given());
        let arguments: usize =
            given.map_or(0, |given| given.value.iter().map(|argument| argument.value.len() + 1).sum());
        let variables = texts(&raw.env).into_iter().chain(texts(&raw.env_files));
        let variables: usize = variables.map(|(name, value)| name.len() + value.len() + 2).sum();
        if arguments + variables > defaults::ARGUMENT_BYTES_MAX {
            self.problems.report(
                raw.heading.clone(),
                format!(
                    "bulkhead `{}` has {} bytes of arguments and environment, but the maximum is {}",
                    raw.name,
                    arguments + variables,
                    units::format_size(defaults::ARGUMENT_BYTES_MAX as u64)
                ),
                "put large values into a file, and pass the file's path instead",
            );
        }
    }

    /// Returns the files that contain the values of environment variables. Checks that each file is valid now, although
    /// the file is read again each time a worker starts.
    pub(super) fn env_files(&mut self, raw: &RawBulkhead) -> Vec<(String, PathBuf)> {
        let Some(given) = raw.env_files.given() else { return Vec::new() };
        if given.value.len() > defaults::ENV_FILES_MAX {
            self.problems.report(
                given.span.clone(),
                format!("`env_files` has more than {} files", defaults::ENV_FILES_MAX),
                "put several values into one file, and pass the path of the file in `env`",
            );
        }
        let mut files = Vec::new();
        for (name, file) in given.value.iter().take(defaults::ENV_FILES_MAX) {
            if let Some(value) = raw.env.given().and_then(|env| env.value.get(name)) {
                let nearest = if value.origin > file.origin { value } else { file };
                self.problems.report(
                    nearest.span.clone(),
                    format!("`{}` is set in both `env` and `env_files`", shown(name)),
                    "remove the variable from one of the tables",
                );
            }
            let label = format!("env_files.{}", shown(name));
            let path = self.env_file(&label, file);
            files.extend(self.ok_or_report(&file.span, path).map(|path| (name.clone(), path)));
        }
        files
    }

    fn env_file(&self, label: &str, file: &Given<String>) -> Result<PathBuf, ValueError> {
        let path = match file.value.strip_prefix(CREDENTIAL) {
            Some(name) => self.credential(label, name)?,
            None if file.value.is_empty() => {
                let message = format!("`{label}` is empty");
                return Err(ValueError::new(message, "specify the path of the file that contains the value"));
            }
            None => programs::resolve(self.folder(&file.span), &file.value),
        };
        match secret_file::read_variable(&path) {
            Ok(_) => Ok(path),
            Err(error) => {
                Err(ValueError::new(format!("`{label}`: {} {error}", path.display()), error.help()))
            }
        }
    }

    /// Returns the path of a credential that systemd passed to the supervisor.
    fn credential(&self, label: &str, name: &str) -> Result<PathBuf, ValueError> {
        if name.is_empty() || name.contains('/') || [".", ".."].contains(&name) {
            return Err(ValueError::new(
                format!("`{label}`: `{}` is not the name of a credential", shown(name)),
                "write a name as in LoadCredential=, such as \"credential:db\"",
            ));
        }
        let variable = defaults::CREDENTIALS_VARIABLE;
        let folder = self.process_env.credentials.as_ref().ok_or_else(|| {
            ValueError::new(
                format!("`{label}` names a credential, but {variable} is not set"),
                format!(
                    "add `LoadCredential={0}:PATH` to the unit; to check the file outside the unit, set \
                     {variable} to a directory with the file {0}",
                    shown(name)
                ),
            )
        })?;
        Ok(folder.join(name))
    }
}
