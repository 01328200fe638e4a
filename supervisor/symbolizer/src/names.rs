//! Resolves addresses to functions, files and lines. Uses debug information if available, otherwise the symbol table,
//! otherwise only the name of the file. `unwind` computes the addresses, and `modules` opens the files.

use std::borrow::Cow;
use std::collections::BTreeMap;

use addr2line::gimli::{DwarfSections, EndianSlice, Error, RunTimeEndian};
use addr2line::{Context, demangle_auto};
use bulkhead_api::{NativeFrame, hex};
use object::{Object, ObjectSymbol, SymbolKind};

use crate::modules::{Elf, Module, Modules, section_data};
use crate::unwind::CodeAddress;

type Slice<'s> = EndianSlice<'s, RunTimeEndian>;

/// Returns the frames at each address: one for the function itself, and one for each inlined function.
pub(crate) fn frames(modules: &Modules<'_>, addresses: &[CodeAddress]) -> Vec<Vec<NativeFrame>> {
    let mut by_module: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    let mut found: Vec<Vec<NativeFrame>> = Vec::new();
    for (index, code) in addresses.iter().enumerate() {
        let Some((mapping, module)) = modules.at(code.lookup) else {
            found.push(vec![NativeFrame { offset: hex(code.address), ..NativeFrame::default() }]);
            continue;
        };
        let in_file = |address: u64| match module {
            Some(module) => address.wrapping_sub(module.bias),
            None => address.wrapping_sub(mapping.start).wrapping_add(mapping.offset),
        };
        let frame = NativeFrame {
            module: Some(mapping.path.to_owned()),
            offset: hex(in_file(code.address)),
            build_id: module.and_then(|module| module.build_id.clone()),
            ..NativeFrame::default()
        };
        if module.is_some() {
            by_module.entry(mapping.start).or_default().push(index);
        }
        found.push(vec![frame]);
    }
    for indices in by_module.values() {
        let lookup = |index: usize| addresses[index].lookup;
        let Some((_, Some(module))) = modules.at(lookup(indices[0])) else { continue };
        let of_module: Vec<u64> =
            indices.iter().map(|index| lookup(*index).wrapping_sub(module.bias)).collect();
        for (index, named) in indices.iter().zip(names(module, modules.debug_folders, &of_module)) {
            let base = found[*index][0].clone();
            let with_names = named.into_iter().map(|name| NativeFrame {
                function: name.function,
                file: name.file,
                line: name.line,
                ..base.clone()
            });
            let with_names: Vec<NativeFrame> = with_names.collect();
            if !with_names.is_empty() {
                found[*index] = with_names;
            }
        }
    }
    found
}

#[derive(Default)]
struct Name {
    function: Option<String>,
    file: Option<String>,
    line: Option<u32>,
}

/// Returns the function names and source lines at each address of a module. The innermost inlined function comes first.
fn names(module: &Module, debug_folders: &[String], addresses: &[u64]) -> Vec<Vec<Name>> {
    let Some(elf) = module.elf() else { return Vec::new() };
    let separate =
        elf.section_by_name(".debug_info").is_none().then(|| module.debug_file(debug_folders)).flatten();
    let debug = separate.as_ref().and_then(|data| Elf::parse(data).ok());
    let debug = debug.as_ref().unwrap_or(&elf);
    let sections = sections(debug);
    let mut names: Vec<Vec<Name>> = match sections.as_ref().and_then(|it| context(debug, it)) {
        Some(context) => addresses.iter().map(|address| debug_names(&context, *address)).collect(),
        None => addresses.iter().map(|_| Vec::new()).collect(),
    };
    let symbols = symbols(&[debug, &elf], addresses);
    for (names, symbol) in names.iter_mut().zip(symbols) {
        if names.is_empty() {
            names.push(Name::default());
        }
        // The symbol belongs to the outermost function. In the debug information, the name of this function can lack
        // the path.
        if let (Some(name), Some(symbol)) = (names.last_mut(), symbol)
            && name.function.as_ref().is_none_or(|function| symbol.contains(function))
        {
            name.function = Some(symbol);
        }
    }
    names
}

/// Returns the sections with debug information.
fn sections<'m>(elf: &Elf<'m>) -> Option<DwarfSections<Cow<'m, [u8]>>> {
    DwarfSections::load(|id| Ok::<_, Error>(section_data(elf, id.name()).unwrap_or_default())).ok()
}

fn context<'s>(elf: &Elf<'_>, sections: &'s DwarfSections<Cow<'_, [u8]>>) -> Option<Context<Slice<'s>>> {
    let endian = if elf.is_little_endian() { RunTimeEndian::Little } else { RunTimeEndian::Big };
    Context::from_dwarf(sections.borrow(|data| EndianSlice::new(data, endian))).ok()
}

fn debug_names(context: &Context<Slice<'_>>, address: u64) -> Vec<Name> {
    let mut names = Vec::new();
    let Ok(mut frames) = context.find_frames(address).skip_all_loads() else { return names };
    while let Ok(Some(frame)) = frames.next() {
        if names.len() >= bulkhead_api::NATIVE_FRAMES_MAX {
            break;
        }
        let function = frame.function.as_ref().and_then(|name| Some(name.demangle().ok()?.into_owned()));
        let (file, line) = frame.location.map_or((None, None), |at| (at.file.map(str::to_owned), at.line));
        names.push(Name { function, file, line });
    }
    names
}

/// Returns the name of the symbol that contains each address.
fn symbols(files: &[&Elf<'_>], addresses: &[u64]) -> Vec<Option<String>> {
    let mut found = vec![None; addresses.len()];
    for file in files {
        for symbol in file.symbols().chain(file.dynamic_symbols()) {
            if !matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Unknown) || symbol.size() == 0 {
                continue;
            }
            for (place, address) in found.iter_mut().zip(addresses) {
                let is_inside = address.wrapping_sub(symbol.address()) < symbol.size();
                if is_inside && place.is_none() {
                    *place = symbol.name().ok().map(|name| demangle_auto(name.into(), None).into_owned());
                }
            }
        }
    }
    found
}
