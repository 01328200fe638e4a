//! Reads values that consist of several strings, such as a program with its arguments, names, paths or environment
//! variables. Checks only the form of each string. `relations` checks whether programs, files and bulkheads exist.

use toml::de::DeValue;

use super::{Arguments, Environment, Field, Given, TableReader};
use crate::diagnostics::shown;
use crate::key::Kind;
use crate::values::{self, LabelledKey, ValueError};

impl TableReader<'_, '_> {
    /// Reads an array that contains a program and its arguments, or a list of names, words or paths. Reports and skips
    /// invalid strings. An empty array is an error only for a program.
    pub(crate) fn strings(&mut self, name: &str) -> Field<Arguments> {
        self.read_partly(name, |reader, key, value| {
            let array = match value.get_ref() {
                DeValue::Array(array) => array,
                DeValue::String(text) => return Err(not_an_array(key, text)),
                other => return Err(values::wrong_type(key, "an array of strings", other)),
            };
            let (max, what) = match key.kind {
                Kind::Names(max) => (max, "names"),
                Kind::Paths(max) => (max, "paths"),
                Kind::Words(of) => (of.len(), "words"),
                _ => (usize::MAX, "arguments"),
            };
            if let Some(beyond) = array.get(max) {
                let message = format!("`{}` has more than {max} {what}", key.label);
                let error = ValueError::new(message, format!("remove entries until at most {max} remain"));
                reader.report_error(beyond.span(), error);
            }
            let (mut taken, mut has_first) = (Vec::new(), false);
            for (index, element) in array.iter().take(max).enumerate() {
                if let Some(value) =
                    reader.ok_or_report(element.span(), element_of(key, index, element.get_ref()))
                {
                    has_first |= index == 0;
                    taken.push(Given { value, span: element.span(), origin: reader.origin });
                }
            }
            if key.kind != Kind::Program {
                return Ok(Some(taken));
            }
            if array.is_empty() {
                let help = format!("write the program and the arguments: `{} = {}`", key.name, key.example());
                return Err(ValueError::new(format!("`{}` is empty", key.name), help));
            }
            // A valid program is looked up even if some of its arguments are invalid.
            Ok(has_first.then_some(taken))
        })
    }

    /// Reads a table of environment variables, or of files that contain their values. Invalid variables are reported
    /// and skipped.
    pub(crate) fn environment(&mut self, name: &str) -> Field<Environment> {
        self.read_partly(name, |reader, key, value| {
            let DeValue::Table(table) = value.get_ref() else {
                return Err(values::wrong_type(key, "a table of strings", value.get_ref()));
            };
            let mut taken = Environment::new();
            for (variable, value) in table.iter() {
                let name = variable.get_ref();
                reader.ok_or_report(variable.span(), variable_name(key, name));
                let text = variable_value(key, name, value.get_ref());
                if let Some(text) = reader.ok_or_report(value.span(), text) {
                    let given = Given { value: text, span: value.span(), origin: reader.origin };
                    taken.insert(name.to_string(), given);
                }
            }
            Ok(Some(taken))
        })
    }
}

fn not_an_array(key: &LabelledKey, text: &str) -> ValueError {
    let help = match key.kind {
        Kind::Program => values::split_help(key.name, text),
        _ => format!("write `{} = [\"{}\"]`", key.name, shown(text)),
    };
    ValueError::new(format!("`{}` must be an array of strings, not a string", key.label), help)
}

/// Returns the text of a number or boolean that was probably meant to be a string.
fn unquoted(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::Integer(number) => Some(number.to_string()),
        DeValue::Float(number) => Some(number.to_string()),
        DeValue::Boolean(boolean) => Some(boolean.to_string()),
        _ => None,
    }
}

/// Reads one string in an array. Rejects an empty string where a path, a word or the name of a program is expected.
fn element_of(key: &LabelledKey, index: usize, value: &DeValue<'_>) -> Result<String, ValueError> {
    let label = format!("{}[{index}]", key.label);
    let example = || format!("write `{} = {}`", key.name, key.example());
    let DeValue::String(text) = value else {
        let help = unquoted(value).map_or_else(example, |text| format!("write \"{text}\""));
        let found = values::type_name(value);
        return Err(ValueError::new(format!("`{label}` must be a string, not {found}"), help));
    };
    match key.kind {
        Kind::Words(of) => values::check_word(&label, text, of)?,
        Kind::Paths(_) => values::path_text(&label, text, key)?,
        Kind::Program if index == 0 && text.is_empty() => {
            let message = format!("`{label}` is empty, but must be the name or path of a program");
            return Err(ValueError::new(message, example()));
        }
        Kind::Program => values::no_nul(&label, text)?,
        _ => {}
    }
    Ok(text.to_string())
}

fn variable_name(key: &LabelledKey, name: &str) -> Result<(), ValueError> {
    let example = || format!("write `{} = {}`", key.name, key.example());
    if name.is_empty() {
        return Err(ValueError::new(format!("a name in `{}` is empty", key.name), example()));
    }
    if name.contains(['=', '\0']) {
        return Err(ValueError::new(
            format!(
                "`{}` cannot be the name of an environment variable because it contains `=` or a NUL byte",
                shown(name)
            ),
            example(),
        ));
    }
    if name.starts_with("BULKHEAD_") {
        return Err(ValueError::new(
            format!(
                "`{}` is reserved: only the supervisor sets variables whose names start with `BULKHEAD_`",
                shown(name)
            ),
            "choose another name",
        ));
    }
    Ok(())
}

fn variable_value(key: &LabelledKey, name: &str, value: &DeValue<'_>) -> Result<String, ValueError> {
    let name = shown(name);
    let label = format!("{}.{name}", key.name);
    let DeValue::String(text) = value else {
        let literal = unquoted(value).unwrap_or_else(|| "value".to_owned());
        return Err(ValueError::new(
            format!("`{label}` must be a string, not {}", values::type_name(value)),
            format!("write `{name} = \"{literal}\"`"),
        ));
    };
    values::no_nul(&label, text)?;
    Ok(text.to_string())
}
