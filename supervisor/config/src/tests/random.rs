//! Property tests. The parser must accept or reject any text without panicking, and it must be possible to display
//! every result.

use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

fn answer(text: &str) {
    match FOLDER.parse(text) {
        Ok(config) => assert_eq!(FOLDER.again(&config), config),
        Err(errors) => {
            assert!(!errors.problems().is_empty());
            assert!(!errors.render(false).is_empty() && !errors.render(true).is_empty());
        }
    }
}

/// Generates fragments of TOML. A file made of fragments is more likely to be valid than a file of random characters.
fn token() -> impl Strategy<Value = String> {
    let words: Vec<String> = reference()
        .into_iter()
        .flat_map(|key| {
            [format!("[{}]\n", key.table.replace("NAME", "a")), format!("{} = ", key.name), key.example()]
        })
        .chain(
            ["\n", "=", "{", "}", "[", "]", ",", "\"", "\r\n", "\t", "-1\n", "0\n", "\"5s\"\n", "{}\n", "ä"]
                .map(str::to_owned),
        )
        .collect();
    prop_oneof![9 => prop::sample::select(words), 1 => ".{0,3}"]
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn parser_never_panics_on_arbitrary_text(text in "(?s).{0,200}") {
        answer(&text);
    }

    #[test]
    fn parser_never_panics_on_arbitrary_tokens(tokens in prop::collection::vec(token(), 0..40)) {
        answer(&tokens.concat());
    }

    #[test]
    fn parser_never_panics_on_mutated_files(cut in 0..FULL.len(), length in 0usize..30, insert in token()) {
        let start = (0..=cut).rev().find(|at| FULL.is_char_boundary(*at)).unwrap_or(0);
        let end = (start + length..=FULL.len()).find(|at| FULL.is_char_boundary(*at)).unwrap_or(FULL.len());
        answer(&format!("{}{insert}{}", &FULL[..start], &FULL[end..]));
    }

    #[test]
    fn loader_never_panics_on_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        let path = FOLDER.path("random.toml");
        fs::write(&path, bytes).unwrap();
        if let Err(errors) = load(&path) {
            prop_assert!(!errors.to_string().is_empty());
        }
    }

    #[test]
    fn formatted_duration_parses_to_same_duration(nanos in 0u64..u64::MAX) {
        let duration = std::time::Duration::from_nanos(nanos);
        prop_assert_eq!(units::parse_duration(&units::format_duration(duration)), Ok(duration));
    }

    #[test]
    fn formatted_size_parses_to_same_size(bytes: u64, shift in 0u32..64) {
        for bytes in [bytes >> shift, (bytes >> shift) << shift] {
            prop_assert_eq!(units::parse_size(&units::format_size(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn unit_parsers_never_panic(text in "[0-9.]{0,30} ?[a-zA-Z]{0,4}") {
        let _ = (units::parse_size(&text), units::parse_duration(&text));
    }

    #[test]
    fn environment_variables_survive_configuration_summary(
        env in prop::collection::btree_map("[^=\0]{1,8}", "[^\0]{0,12}", 0..5)
    ) {
        let mut config = FOLDER.accept(&bulkhead(""));
        config.bulkheads[0].env =
            env.into_iter().filter(|(name, _)| !name.starts_with("BULKHEAD_")).collect();
        prop_assert_eq!(FOLDER.again(&config), config);
    }
}
