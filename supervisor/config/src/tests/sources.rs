//! Tests of the files in `conf.d`, and of the default path.

use super::*;

const MAIN: &str =
    "[supervisor]\nsocket = \"s\"\n[defaults]\ndeadline = \"7s\"\n[bulkhead.a]\nexec = [\"cat\"]\n";

/// Returns the configuration of a bulkhead called `name`.
fn named(name: &str) -> String {
    format!("[bulkhead.{name}]\nexec = [\"cat\"]\n")
}

impl Folder {
    /// Writes the main file and the files in `conf.d`, and returns the path of the main file.
    fn configured(&self, main: &str, fragments: &[(&str, &str)]) -> PathBuf {
        fs::create_dir_all(self.path("conf.d")).unwrap();
        for (name, text) in fragments {
            fs::write(self.path("conf.d").join(name), text).unwrap();
        }
        fs::write(self.path("workers.toml"), main).unwrap();
        self.path("workers.toml")
    }

    #[track_caller]
    fn problems(&self, main: &str, fragments: &[(&str, &str)]) -> Vec<(String, Problem)> {
        let errors = load(&self.configured(main, fragments)).unwrap_err();
        let name = |problem: &Problem| problem.file.file_name().unwrap().to_string_lossy().into_owned();
        errors.problems().iter().map(|problem| (name(problem), problem.clone())).collect()
    }
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn fragments_add_bulkheads_and_access_in_name_order() {
    let folder = Folder::new();
    let access = "[[access]]\nuid = 7\nbulkheads = [\"a\", \"z\"]\n";
    let fragments = [
        ("20-b.toml", named("b")),
        ("10-z.toml", format!("\u{feff}{access}{}", named("z"))),
        ("15.toml", String::new()),
        ("30-c.toml.dpkg-old", "nonsense".to_owned()),
        (".#40-d.toml", "nonsense".to_owned()),
        ("README", "nonsense".to_owned()),
    ];
    let fragments: Vec<_> = fragments.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let main = format!("{MAIN}[[access]]\ngid = 9\n");
    let config = load(&folder.configured(&main, &fragments)).unwrap();
    let names: Vec<_> = config.bulkheads.iter().map(|bulkhead| bulkhead.name.as_str()).collect();
    assert_eq!(names, ["a", "z", "b"]);
    assert!(config.bulkheads.iter().all(|bulkhead| bulkhead.deadline.as_secs() == 7), "[defaults] applies");
    let who: Vec<_> = config.access.iter().map(|entry| entry.who.clone()).collect();
    assert_eq!(who, [Who::Gid(9), Who::Uid(7)]);
    let paths = ["10-z.toml", "15.toml", "20-b.toml"].map(|name| folder.path("conf.d").join(name));
    assert_eq!(
        (config.path.clone(), config.fragments.clone()),
        (folder.path("workers.toml"), paths.to_vec())
    );
    assert!(paths.iter().all(|path| config.summary().contains(path.to_str().unwrap())));
}

#[test]
fn main_file_can_leave_all_bulkheads_to_fragments() {
    let folder = Folder::new();
    let config =
        load(&folder.configured("[supervisor]\nsocket = \"s\"\n", &[("b.toml", &named("b"))])).unwrap();
    assert_eq!(config.bulkheads.len(), 1);
    let problems = folder.problems("[supervisor]\nsocket = \"s\"\n", &[("b.toml", "")]);
    assert_eq!(problems[0].0, "workers.toml");
    assert_problem(&problems[0].1, (1, 1), "contains no bulkheads", "add a");
}

#[test]
fn json_schema_accepts_each_file_of_valid_configuration() {
    let folder = Folder::new();
    let bulkhead = named("b");
    let fragments = ["[[access]]\nuid = 7\n", "[bulkhead]\n", &bulkhead, ""];
    let files: Vec<_> = ["1.toml", "2.toml", "3.toml", "4.toml"].into_iter().zip(fragments).collect();
    let head = "[supervisor]\nsocket = \"s\"\n";
    for main in ["", "[defaults]\ndeadline = \"7s\"\n", "[bulkhead]\n"].map(|rest| format!("{head}{rest}")) {
        load(&folder.configured(&main, &files)).unwrap();
        for text in [&*main].into_iter().chain(fragments) {
            assert_eq!(json_schema::complaints(text), Some(Vec::new()), "{text}");
        }
    }
}

#[test]
fn each_files_relative_paths_start_at_its_own_directory() {
    let folder = Folder::new();
    let main = "[supervisor]\nsocket = \"s\"\n[defaults]\nenv_files = { MAIN = \"token\" }\n\
                [defaults.sandbox]\nread = [\"work\"]\n";
    let fragment = "[bulkhead.b]\ncommand = [\"../thumbnail-worker\"]\n[bulkhead.c]\nexec = [\"./own\"]\ncwd = \"..\"\n\
         env_files = { OWN = \"secret\" }\n";
    folder.configured("", &[]);
    folder.token("conf.d/secret", "sesame", 0o600);
    let path = folder.configured(main, &[("b.toml", fragment)]);
    folder.write("conf.d/own", 0o755);
    let config = load(&path).unwrap();
    let [b, c] = config.bulkheads.as_slice() else { panic!("{config:?}") };
    assert_eq!(b.sandbox.read, [folder.path("work")], "a path in [defaults] starts at the main file");
    assert_eq!(b.cwd, folder.path("conf.d"));
    assert_eq!(c.cwd, folder.path("conf.d/.."));
    let files = [("MAIN", "token"), ("OWN", "conf.d/secret")];
    assert_eq!(c.env_files, files.map(|(name, path)| (name.to_owned(), folder.path(path))));
    let (Program::Command { path: b, .. }, Program::Exec { path: c, .. }) = (&b.program, &c.program) else {
        panic!("{config:?}")
    };
    assert_eq!((b, c), (&folder.path("conf.d/../thumbnail-worker"), &folder.path("conf.d/own")));
}

#[test]
fn problems_in_all_files_are_reported_with_positions() {
    let folder = Folder::new();
    let main = format!("{MAIN}deadlin = \"5s\"\n");
    let first = format!("# größe\n{}processes = 0\nfallback = [\"nobody\"]\n", named("b"));
    let second = "[supervisor]\nmax_clients = 5\n[defaults]\ngrace = \"1s\"\n[bulkhead.a]\nexec = [\"cat\"]\n\
                  [bulkhead.b]\nexec = [\"cat\"]\n[bulkhed.d]\n";
    let problems = folder.problems(&main, &[("1.toml", &first), ("2.toml", second)]);
    let found: Vec<_> = problems
        .iter()
        .map(|(file, problem)| (file.as_str(), problem.at.map(|at| (at.line, at.column)), &*problem.message))
        .collect();
    let place = |name: &str, place: &str| format!("{}:{place}", folder.path(name).display());
    let (a, b) = (place("workers.toml", "5:11"), place("conf.d/1.toml", "2:11"));
    let (a, b) = (
        format!("bulkhead `a` is already defined in {a}"),
        format!("bulkhead `b` is already defined in {b}"),
    );
    let expected = [
        ("workers.toml", Some((7, 1)), "unknown key `deadlin` in [bulkhead.a]"),
        ("1.toml", Some((4, 13)), "`processes` must be from 1 to 1024, not 0"),
        ("1.toml", Some((5, 13)), "`fallback` contains `nobody`, but there is no bulkhead of that name"),
        ("2.toml", Some((1, 2)), "[supervisor] is not allowed in conf.d"),
        ("2.toml", Some((3, 2)), "[defaults] is not allowed in conf.d"),
        ("2.toml", Some((5, 11)), &*a),
        ("2.toml", Some((7, 11)), &*b),
        ("2.toml", Some((9, 2)), "unknown key `bulkhed` at the top of the file"),
    ];
    assert_eq!(found, expected);
    let report = load(&folder.path("workers.toml")).unwrap_err().to_string();
    let second = format!(" --> {}:5:11\n  |\n5 | [bulkhead.a]\n", folder.path("conf.d/2.toml").display());
    assert!(report.contains(&second), "{report}");
    assert!(report.ends_with(&format!("{}: 8 errors", folder.path("workers.toml").display())), "{report}");
}

#[test]
fn syntax_errors_in_all_files_are_reported() {
    let folder = Folder::new();
    let problems =
        folder.problems("[supervisor\n", &[("1.toml", "\n[bulkhead.b]\nexec: 5\n"), ("2.toml", "a = \"\n")]);
    let found: Vec<_> = problems.iter().map(|(file, problem)| (&**file, problem.at.unwrap().line)).collect();
    assert_eq!(found, [("workers.toml", 1), ("1.toml", 3), ("2.toml", 1)]);
}

#[test]
fn wrong_types_in_fragments_are_errors() {
    let folder = Folder::new();
    let main = format!("other = 1\n{MAIN}[[access]]\nuid = 7\n");
    let fragment = "bulkhead = 5\naccess = \"x\"\nother = 2\n";
    let messages: Vec<_> = folder
        .problems(&main, &[("1.toml", fragment)])
        .into_iter()
        .map(|(file, problem)| (file, problem.message))
        .collect();
    let expected = [
        ("workers.toml", "unknown key `other` at the top of the file"),
        ("1.toml", "`bulkhead` must be a table, not a number"),
        ("1.toml", "`access` must be an array of tables, not a string"),
        ("1.toml", "unknown key `other` at the top of the file"),
    ];
    assert_eq!(messages, expected.map(|(file, message)| (file.to_owned(), message.to_owned())));
    // A value of the wrong type in the main file is reported only once.
    let problems =
        folder.problems("bulkhead = 5\n[supervisor]\nsocket = \"s\"\n", &[("1.toml", &named("b"))]);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_problem(&problems[0].1, (1, 12), "`bulkhead` must be a table, not a number", "");
}

#[test]
fn fragments_writable_by_others_are_rejected() {
    let folder = Folder::new();
    let path = folder.configured(MAIN, &[("1.toml", &named("b")), ("2.toml", &named("c")), ("3.toml", "x")]);
    let file = |name: &str| folder.path("conf.d").join(name);
    mode(&file("1.toml"), 0o646);
    // Group write permission does not matter if the group is the supervisor's own.
    mode(&file("2.toml"), 0o664);
    let errors = load(&path).unwrap_err();
    let told: Vec<_> = errors.problems().iter().map(|problem| (problem.file.clone(), problem.at)).collect();
    assert_eq!(
        told,
        [(file("1.toml"), None), (file("3.toml"), Some(Position { line: 1, column: 2 }))],
        "{errors}"
    );
    let first = &errors.problems()[0];
    assert!(first.message.contains("every user can change the file (mode 0646)"), "{first:?}");
    assert!(first.help.as_deref().unwrap().contains("chmod go-w"), "{first:?}");
    fs::remove_file(file("3.toml")).unwrap();
    mode(&file("1.toml"), 0o644);
    assert_eq!(load(&path).unwrap().bulkheads.len(), 3);
    if !rustix::process::geteuid().is_root() {
        return eprintln!("NOT RUN: only root can give files to other users and groups");
    }
    for (owner, group, refused) in [(Some(9), None, true), (None, Some(9), true), (None, Some(0), false)] {
        std::os::unix::fs::chown(file("2.toml"), Some(owner.unwrap_or(0)), group).unwrap();
        assert_eq!(load(&path).is_err(), refused, "{owner:?} {group:?}");
        if let Err(errors) = load(&path) {
            let name = if owner.is_some() { "user 9 owns the file" } else { "group 9 can change the file" };
            assert!(errors.to_string().contains(name), "{errors}");
        }
    }
}

#[test]
fn unreadable_fragments_are_errors() {
    let folder = Folder::new();
    let path = folder.configured(MAIN, &[("4.toml", "\n\n# \u{e4}"), ("real", &named("b"))]);
    fs::write(folder.path("conf.d/5.toml"), b"# \xff").unwrap();
    fs::create_dir(folder.path("conf.d/1.toml")).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path("conf.d/2.toml")).unwrap();
    // A link to a regular file is followed, because ConfigMaps are mounted that way.
    std::os::unix::fs::symlink("real", folder.path("conf.d/3.toml")).unwrap();
    let errors = load(&path).unwrap_err();
    let told: Vec<_> = errors
        .problems()
        .iter()
        .map(|problem| (problem.file.file_name().unwrap().to_str().unwrap(), problem.at.is_some()))
        .collect();
    assert_eq!(told, [("1.toml", false), ("2.toml", false), ("5.toml", true)], "{errors}");
    for part in ["1.toml: the path is a directory", "2.toml: No such file", "or delete it", "byte 0xff"] {
        assert!(errors.to_string().contains(part), "{part}: {errors}");
    }
    fs::remove_dir_all(folder.path("conf.d")).unwrap();
    assert_eq!(load(&path).unwrap().bulkheads.len(), 1, "the directory is optional");
    fs::write(folder.path("conf.d"), "").unwrap();
    let errors = load(&path).unwrap_err();
    assert!(errors.to_string().contains("conf.d: Not a directory"), "{errors}");
}

/// If a link without a target were accepted, a reload would remove all bulkheads that are defined in the folder.
#[test]
fn fragments_folder_without_link_target_is_an_error() {
    let folder = Folder::new();
    let path = folder.configured(MAIN, &[("b.toml", &named("b"))]);
    fs::rename(folder.path("conf.d"), folder.path("real")).unwrap();
    std::os::unix::fs::symlink("real", folder.path("conf.d")).unwrap();
    assert_eq!(load(&path).unwrap().bulkheads.len(), 2);
    fs::rename(folder.path("real"), folder.path("other")).unwrap();
    let errors = load(&path).unwrap_err().to_string();
    assert!(errors.contains("conf.d: the target of the symbolic link does not exist"), "{errors}");
}

#[test]
fn number_of_fragments_is_limited() {
    let folder = Folder::new();
    let path = folder.configured(MAIN, &[]);
    (0..=defaults::FRAGMENTS_MAX)
        .for_each(|number| fs::write(folder.path("conf.d").join(format!("{number}.toml")), "").unwrap());
    let errors = load(&path).unwrap_err();
    assert!(errors.to_string().contains("contains more than 256 configuration files"), "{errors}");
    fs::remove_file(folder.path("conf.d/0.toml")).unwrap();
    load(&path).unwrap();
}

#[test]
fn default_path_depends_on_user_and_environment() {
    let path = |is_root: bool, variables: &[(&str, &str)]| {
        let variable = |name: &str| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        };
        default_path_in(is_root, variable).map(|path| path.display().to_string())
    };
    let user = [("XDG_CONFIG_HOME", "/x"), ("HOME", "/home/u"), ("BULKHEAD_CONFIG", "")];
    for (is_root, variables, expected) in [
        (true, &user[..], Some("/etc/bulkhead/workers.toml")),
        (false, &user[..], Some("/x/bulkhead/workers.toml")),
        (false, &user[1..], Some("/home/u/.config/bulkhead/workers.toml")),
        (false, &[("XDG_CONFIG_HOME", "x")], None),
        (false, &[], None),
        (true, &[("BULKHEAD_CONFIG", "own.toml")], Some("own.toml")),
        (false, &[("BULKHEAD_CONFIG", "own.toml"), ("HOME", "/h")], Some("own.toml")),
    ] {
        assert_eq!(path(is_root, variables).as_deref(), expected, "{is_root} {variables:?}");
    }
}
