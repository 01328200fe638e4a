//! Values that are made of strings: a program with its arguments, names, paths, an environment.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeArray, DeValue};

use super::{Arguments, Environment, Field, Given, TableReader};
use crate::diagnostics::shown;
use crate::key::Kind;
use crate::values::{self, Complaint, Named};

impl TableReader<'_, '_> {
    /// Takes an array of strings: a program and its arguments, or names.
    pub(crate) fn strings(&mut self, name: &str) -> Field<Arguments> {
        match self.entry(name) {
            None => self.missing(name),
            Some((key, value)) if key.kind == Kind::Program => self.arguments(&key, value),
            Some((key, value)) => self.names(&key, value),
        }
    }

    fn arguments(&mut self, key: &Named, value: &Spanned<DeValue<'_>>) -> Field<Arguments> {
        let name = key.name;
        let taken = match value.get_ref() {
            DeValue::Array(array) => self.array(key, value.span(), array),
            DeValue::String(text) => {
                let complaint = Complaint::new(
                    format!("`{name}` must be an array of strings, not a string"),
                    values::split_help(name, text),
                );
                self.problems.report(value.span(), complaint.message, complaint.help);
                None
            }
            other => {
                let complaint = values::wrong_type(key, "an array of strings", other);
                self.problems.report(value.span(), complaint.message, complaint.help);
                None
            }
        };
        match taken {
            Some(taken) => Field::Given(Given { value: taken, span: value.span(), origin: self.origin }),
            None => Field::Refused,
        }
    }

    /// Takes an array of names, words or paths. One that is wrong is reported and left out; there may be
    /// none.
    fn names(&mut self, key: &Named, value: &Spanned<DeValue<'_>>) -> Field<Arguments> {
        let DeValue::Array(array) = value.get_ref() else {
            self.complain(value.span(), not_names(key, value.get_ref()));
            return Field::Refused;
        };
        let bound = match key.kind {
            Kind::Names { max } => Some((max, "names")),
            Kind::Paths { max } => Some((max, "paths")),
            Kind::Words { of } => Some((of.len(), "words")),
            _ => None,
        };
        let Some((max, what)) = bound else {
            self.complain(value.span(), values::unreadable(key));
            return Field::Refused;
        };
        if let Some(beyond) = array.get(max) {
            self.complain(
                beyond.span(),
                Complaint::new(
                    format!("`{}` has more than {max} {what}", key.label),
                    format!("keep the first {max}, or fewer"),
                ),
            );
        }
        let mut taken = Vec::new();
        for (index, element) in array.iter().take(max).enumerate() {
            match element_of(key, index, element.get_ref()) {
                Ok(value) => taken.push(Given { value, span: element.span(), origin: self.origin }),
                Err(complaint) => self.complain(element.span(), complaint),
            }
        }
        Field::Given(Given { value: taken, span: value.span(), origin: self.origin })
    }

    fn array(&mut self, key: &Named, span: Range<usize>, array: &DeArray<'_>) -> Option<Arguments> {
        let mut taken = Vec::new();
        let mut program_taken = false;
        for (index, element) in array.iter().enumerate() {
            match argument(key, index, element.get_ref()) {
                Ok(value) => {
                    program_taken |= index == 0;
                    taken.push(Given { value, span: element.span(), origin: self.origin });
                }
                Err(complaint) => self.problems.report(element.span(), complaint.message, complaint.help),
            }
        }
        if array.is_empty() {
            let help = format!("write the program and its arguments: `{} = {}`", key.name, key.example());
            self.problems.report(span, format!("`{}` is empty", key.name), help);
        }
        // A wrong argument was reported; the program before it is still worth looking up.
        program_taken.then_some(taken)
    }

    /// Takes a table of strings as an environment. A variable that is wrong is reported and left out.
    pub(crate) fn environment(&mut self, name: &str) -> Field<Environment> {
        let Some((key, value)) = self.entry(name) else { return self.missing(name) };
        let DeValue::Table(table) = value.get_ref() else {
            let complaint = values::wrong_type(&key, "a table of strings", value.get_ref());
            self.problems.report(value.span(), complaint.message, complaint.help);
            return Field::Refused;
        };
        let mut taken = Environment::new();
        for (variable, value) in table.iter() {
            if let Err(complaint) = variable_name(variable.get_ref()) {
                self.problems.report(variable.span(), complaint.message, complaint.help);
            }
            match variable_value(variable.get_ref(), value.get_ref()) {
                Ok(text) => drop(taken.insert(variable.get_ref().to_string(), text)),
                Err(complaint) => self.problems.report(value.span(), complaint.message, complaint.help),
            }
        }
        Field::Given(Given { value: taken, span: value.span(), origin: self.origin })
    }
}

fn not_names(key: &Named, value: &DeValue<'_>) -> Complaint {
    match value {
        DeValue::String(text) => Complaint::new(
            format!("`{}` must be an array of strings, not a string", key.label),
            format!("write `{} = [\"{}\"]`", key.name, shown(text)),
        ),
        other => values::wrong_type(key, "an array of strings", other),
    }
}

/// One element of an array of strings.
fn string(key: &Named, index: usize, value: &DeValue<'_>) -> Result<String, Complaint> {
    let help = match value {
        DeValue::String(text) => return Ok(text.to_string()),
        DeValue::Integer(number) => format!("write \"{number}\""),
        DeValue::Float(number) => format!("write \"{number}\""),
        DeValue::Boolean(boolean) => format!("write \"{boolean}\""),
        _ => format!("write `{} = {}`", key.name, key.example()),
    };
    let found = values::type_name(value);
    Err(Complaint::new(format!("`{}[{index}]` must be a string, not {found}", key.label), help))
}

/// One name, word or path of an array.
fn element_of(key: &Named, index: usize, value: &DeValue<'_>) -> Result<String, Complaint> {
    let text = string(key, index, value)?;
    match key.kind {
        Kind::Words { of } => values::one_of(&format!("{}[{index}]", key.label), &text, of)?,
        Kind::Paths { .. } => values::path_text(&format!("{}[{index}]", key.label), &text, key)?,
        _ => {}
    }
    Ok(text)
}

/// An argument may be empty, a program may not.
fn argument(key: &Named, index: usize, value: &DeValue<'_>) -> Result<String, Complaint> {
    let label = format!("{}[{index}]", key.name);
    let text = string(key, index, value)?;
    if index == 0 && text.is_empty() {
        return Err(Complaint::new(
            format!("`{label}` is empty, where the program should be"),
            format!("write `{} = {}`", key.name, key.example()),
        ));
    }
    values::no_nul(&label, &text)?;
    Ok(text)
}

fn variable_name(name: &str) -> Result<(), Complaint> {
    if name.is_empty() {
        return Err(Complaint::new("a name in `env` is empty", "write `env = { NAME = \"value\" }`"));
    }
    if name.contains(['=', '\0']) {
        return Err(Complaint::new(
            format!("`{}` cannot name a variable: it contains `=` or a NUL byte", shown(name)),
            "write `env = { NAME = \"value\" }`",
        ));
    }
    if name.starts_with("BULKHEAD_") {
        return Err(Complaint::new(
            format!(
                "`{}` is reserved: the supervisor sets the names that start with `BULKHEAD_`",
                shown(name)
            ),
            "choose another name",
        ));
    }
    Ok(())
}

fn variable_value(name: &str, value: &DeValue<'_>) -> Result<String, Complaint> {
    let name = shown(name);
    let text = match value {
        DeValue::String(text) => text,
        DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) => {
            let literal = match value {
                DeValue::Integer(number) => number.to_string(),
                DeValue::Float(number) => number.to_string(),
                _ => value.as_bool().unwrap_or_default().to_string(),
            };
            return Err(Complaint::new(
                format!("`env.{name}` must be a string, not {}", values::type_name(value)),
                format!("write `{name} = \"{literal}\"`"),
            ));
        }
        other => {
            return Err(Complaint::new(
                format!("`env.{name}` must be a string, not {}", values::type_name(other)),
                format!("write `{name} = \"value\"`"),
            ));
        }
    };
    values::no_nul(&format!("env.{name}"), text)?;
    Ok(text.to_string())
}
