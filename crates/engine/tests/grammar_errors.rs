//! What is refused, and with which words.

mod grammar_util;

use std::time::Duration;

use deepinfer::grammar::{CompileError, Compiler, CompilerLimits, GrammarSpec};
use grammar_util::SMALL;
use serde_json::{Value, json};

fn refusal(schema: Value) -> CompileError {
    match SMALL.compile(GrammarSpec::JsonSchema(schema.clone())) {
        Ok(_) => panic!("{schema} was accepted"),
        Err(error) => error,
    }
}

/// Every keyword that cannot be enforced, wherever it stands, is named with its path.
#[test]
fn unsupported_keywords_are_refused_by_name() {
    let uses = [
        ("not", json!({"not": {"type": "null"}})),
        ("if", json!({"if": {"type": "null"}})),
        ("then", json!({"then": {}})),
        ("else", json!({"else": {}})),
        ("contains", json!({"contains": {"const": 1}})),
        ("minContains", json!({"minContains": 1})),
        ("maxContains", json!({"maxContains": 1})),
        ("propertyNames", json!({"propertyNames": {"maxLength": 3}})),
        ("dependencies", json!({"dependencies": {"a": ["b"]}})),
        ("dependentRequired", json!({"dependentRequired": {"a": ["b"]}})),
        ("dependentSchemas", json!({"dependentSchemas": {"a": {}}})),
        ("unevaluatedItems", json!({"unevaluatedItems": false})),
        ("unevaluatedProperties", json!({"unevaluatedProperties": false})),
        ("uniqueItems", json!({"type": "array", "uniqueItems": true})),
        ("contentSchema", json!({"contentSchema": {}})),
        ("$dynamicRef", json!({"$dynamicRef": "#x"})),
        ("$dynamicAnchor", json!({"$dynamicAnchor": "x"})),
        ("$recursiveRef", json!({"$recursiveRef": "#"})),
        ("nullable", json!({"type": "string", "nullable": true})),
        ("x-guidance", json!({"x-guidance": {"lenient": true}})),
        ("minimun", json!({"minimun": 3})),
        ("format", json!({"type": "string", "format": "regex"})),
        ("format", json!({"type": "string", "format": "unknown"})),
        ("format", json!({"type": "string", "format": "int32"})),
        ("format", json!({"format": "int32"})),
        ("oneOf", json!({"oneOf": [{"type": "integer"}, {"type": "number"}]})),
        ("oneOf", json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]})),
        ("minProperties", json!({"type": "object", "minProperties": 2})),
        (
            "minProperties",
            json!({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "additionalProperties": false}),
        ),
        (
            "maxProperties",
            json!({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}),
        ),
        ("minimum", json!({"type": "integer", "minimum": 1e18})),
        ("const", json!({"const": 9007199254740993i64})),
        ("enum", json!({"enum": [{"a": [1e300]}]})),
        ("multipleOf", json!({"type": "number", "multipleOf": 0.07})),
        ("maxLength", json!({"type": "string", "maxLength": 100000000})),
    ];
    let places = [
        ("", json!(null)),
        ("/properties/p", json!("properties")),
        ("/items", json!("items")),
        ("/anyOf/1", json!("anyOf")),
        ("/$defs/d", json!("$defs")),
    ];
    for (keyword, schema) in &uses {
        for (path, place) in &places {
            let whole = match place.as_str() {
                None => schema.clone(),
                Some("properties") => json!({"type": "object", "properties": {"p": schema}}),
                Some("items") => json!({"type": "array", "items": schema}),
                Some("anyOf") => json!({"anyOf": [{"type": "null"}, schema]}),
                Some(_) => json!({"$ref": "#/$defs/d", "$defs": {"d": schema}}),
            };
            match refusal(whole.clone()) {
                CompileError::Unsupported { path: p, keyword: k, .. } => {
                    assert_eq!((p.as_str(), k.as_str()), (*path, *keyword), "{whole}");
                }
                error => panic!("{whole}: {error:?}"),
            }
        }
    }
    let nested =
        refusal(json!({"type": "object", "properties": {"a": {"items": [{}], "$id": "x"}}}));
    assert!(matches!(&nested, CompileError::Unsupported { path, keyword, .. }
        if path == "/properties/a" && keyword == "$id"));
    assert_eq!(
        refusal(json!({"properties": {"a": {"not": {}}}})).to_string(),
        "schema at \"/properties/a\": \"not\" is not supported: write the allowed values"
    );
}

#[test]
fn malformed_schemas_are_refused_with_their_path() {
    let cases = [
        (json!(3), "", ""),
        (json!({"type": "strin"}), "", "type"),
        (json!({"type": []}), "", "type"),
        (json!({"type": 3}), "", "type"),
        (json!({"type": ["string", 3]}), "", "type"),
        (json!({"properties": {"a/b": {"type": "x"}}}), "/properties/a~1b", "type"),
        (json!({"properties": []}), "", "properties"),
        (json!({"properties": {"a": 1}}), "/properties/a", ""),
        (json!({"required": "a"}), "", "required"),
        (json!({"required": [1]}), "", "required"),
        (json!({"items": {"items": 3}}), "/items/items", ""),
        (json!({"prefixItems": {}}), "", "prefixItems"),
        (json!({"prefixItems": []}), "", "prefixItems"),
        (json!({"anyOf": []}), "", "anyOf"),
        (json!({"anyOf": {}}), "", "anyOf"),
        (json!({"allOf": [{}, {"oneOf": 1}]}), "/allOf/1", "oneOf"),
        (json!({"enum": "a"}), "", "enum"),
        (json!({"minLength": -1}), "", "minLength"),
        (json!({"maxItems": 1.5}), "", "maxItems"),
        (json!({"minimum": "1"}), "", "minimum"),
        (json!({"multipleOf": 0}), "", "multipleOf"),
        (json!({"multipleOf": -2}), "", "multipleOf"),
        (json!({"pattern": 3}), "", "pattern"),
        (json!({"format": 3}), "", "format"),
        (json!({"uniqueItems": 3}), "", "uniqueItems"),
        (json!({"$ref": 3}), "", "$ref"),
        (json!({"patternProperties": 3}), "", "patternProperties"),
    ];
    for (schema, path, keyword) in cases {
        match refusal(schema.clone()) {
            CompileError::Malformed { path: p, keyword: k, .. } => {
                assert_eq!((p.as_str(), k.as_str()), (path, keyword), "{schema}");
            }
            error => panic!("{schema}: {error:?}"),
        }
    }
    assert_eq!(
        refusal(json!({"items": {"type": "int"}})).to_string(),
        "schema at \"/items\": \"type\" must be one of null, boolean, integer, number, string, \
         array, object, or a list of these, not \"int\""
    );
}

#[test]
fn empty_enums_bad_patterns_and_references() {
    assert_eq!(
        refusal(json!({"properties": {"c": {"enum": []}}})),
        CompileError::EmptyEnum { path: "/properties/c".into() }
    );
    for pattern in ["(", "[", "a{2,1}", "(?=x)", "(?<!x)y", "\\1", "a(^)b"] {
        match refusal(json!({"items": {"type": "string", "pattern": pattern}})) {
            CompileError::BadPattern { path, pattern: p, .. } => {
                assert_eq!((path.as_str(), p.as_str()), ("/items", pattern));
            }
            error => panic!("{pattern}: {error:?}"),
        }
    }
    assert!(matches!(refusal(json!({"patternProperties": {"(": {}}})),
        CompileError::BadPattern { path, .. } if path == "/patternProperties/("));
    for reference in ["#/$defs/none", "other.json", "https://example.com/s#", "#anchor", "#/%zz"] {
        match refusal(json!({"items": {"$ref": reference}})) {
            CompileError::UnknownRef { path, reference: r, .. } => {
                assert_eq!((path.as_str(), r.as_str()), ("/items", reference));
            }
            error => panic!("{reference}: {error:?}"),
        }
    }
}

#[test]
fn endless_references() {
    let cases = [
        (json!({"$ref": "#"}), ""),
        (json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "/$defs/a"),
        (
            json!({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            "/$defs/a",
        ),
        // Without an end, though every step writes something.
        (json!({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}), ""),
        (json!({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), ""),
        (json!({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}), ""),
        // Left recursion: a value that starts with itself.
        (json!({"anyOf": [{"type": "null"}, {"$ref": "#"}]}), ""),
        (
            json!({"properties": {"o": {"$ref": "#/$defs/l"}}, "$defs": {"l": {"allOf": [{"$ref": "#/$defs/l"}]}}}),
            "/$defs/l",
        ),
    ];
    for (schema, path) in cases {
        assert_eq!(
            refusal(schema.clone()),
            CompileError::Endless { path: path.into() },
            "{schema}"
        );
    }
}

#[test]
fn contradictory_bounds() {
    let cases = [
        json!({"minimum": 3, "maximum": 2}),
        json!({"exclusiveMinimum": 3, "maximum": 3}),
        json!({"exclusiveMinimum": 3, "exclusiveMaximum": 3}),
        json!({"type": "integer", "minimum": 1.2, "maximum": 1.8}),
        json!({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}),
        json!({"minLength": 3, "maxLength": 2}),
        json!({"minItems": 3, "maxItems": 2}),
        json!({"minProperties": 3, "maxProperties": 2}),
        json!({"required": ["a", "b"], "maxProperties": 1}),
        json!({"type": "object", "properties": {"a": {}}, "additionalProperties": false, "minProperties": 2}),
    ];
    for schema in cases {
        match refusal(json!({"items": schema})) {
            CompileError::Contradiction { path, .. } => assert_eq!(path, "/items", "{schema}"),
            error => panic!("{schema}: {error:?}"),
        }
    }
    // Found by putting parts together: no path, but no silence either.
    for schema in [
        json!(false),
        json!({"type": "string", "enum": [1, 2]}),
        json!({"allOf": [{"type": "string"}, {"type": "null"}]}),
        json!({"allOf": [{"minimum": 3}, {"maximum": 2}, {"type": "integer"}]}),
        json!({"type": "object", "required": ["x"], "additionalProperties": false}),
        json!({"type": "array", "items": false, "minItems": 1}),
        json!({"type": "string", "pattern": "^a$", "minLength": 2}),
    ] {
        let error = refusal(schema.clone());
        assert!(matches!(error, CompileError::Contradiction { .. }), "{schema}: {error:?}");
    }
}

#[test]
fn expressions_grammars_and_lists() {
    for expression in ["(", "[z-a]", "a**b(", "(?=a)", "\\1"] {
        let error = SMALL.compile(GrammarSpec::Regex(expression.into())).unwrap_err();
        assert!(matches!(error, CompileError::BadRegex { .. }), "{expression}: {error:?}");
    }
    for text in
        ["start: missing", "start: \"a", "begin: \"a\"", "start: /(/", "start: <nope>", "%%%"]
    {
        let error = SMALL.compile(GrammarSpec::Lark(text.into())).unwrap_err();
        assert!(matches!(error, CompileError::BadGrammar { .. }), "{text}: {error:?}");
        assert!(!error.to_string().contains("backtrace"), "{error}");
    }
    for spec in [GrammarSpec::Lark("  ".into()), GrammarSpec::Choice(vec![])] {
        let error = SMALL.compile(spec).unwrap_err();
        assert!(matches!(error, CompileError::Empty { .. }), "{error:?}");
    }
}

#[test]
fn limits() {
    let limits = CompilerLimits { spec_bytes: 200, schema_nodes: 5, ..Default::default() };
    let compiler = Compiler::new(SMALL.vocabulary.clone(), limits);
    let error = compiler.compile(GrammarSpec::Regex("a".repeat(300))).unwrap_err();
    assert!(matches!(error, CompileError::TooBig { limit: 200, .. }), "{error:?}");
    let wide: Vec<Value> = (0..6).map(|i| json!({"const": i})).collect();
    let error = compiler.compile(GrammarSpec::JsonSchema(json!({"anyOf": wide}))).unwrap_err();
    assert_eq!(
        error,
        CompileError::TooBig { what: "schemas in the specification", size: 6, limit: 5 }
    );
    let mut deep = json!({"type": "null"});
    for _ in 0..70 {
        deep = json!({"items": deep});
    }
    let error = SMALL.compile(GrammarSpec::JsonSchema(deep)).unwrap_err();
    assert!(matches!(error, CompileError::TooBig { what: "nesting of schemas", .. }), "{error:?}");
    let parens = format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    let error = SMALL.compile(GrammarSpec::Lark(parens)).unwrap_err();
    assert!(matches!(error, CompileError::BadGrammar { .. }), "{error:?}");
    let groups = format!("{}a{}", "(".repeat(20_000), ")".repeat(20_000));
    let error = SMALL.compile(GrammarSpec::Regex(groups)).unwrap_err();
    assert!(matches!(error, CompileError::BadRegex { .. }), "{error:?}");
    let huge = GrammarSpec::Regex("(a{1000}|b{999}){1000}(c{1000}d?){1000}".into());
    if let Err(error) = SMALL.compile(huge) {
        assert!(matches!(error, CompileError::TooComplex { .. }), "{error:?}");
    }
}

/// A sum that overflows inside the library is an error, never another grammar.
#[test]
fn overflows_are_errors() {
    let schema =
        json!({"type": "integer", "allOf": [{"multipleOf": 70001}, {"multipleOf": 70003}]});
    assert!(matches!(refusal(schema), CompileError::Fault { .. }));
}

#[test]
fn time_runs_out() {
    let limits = CompilerLimits { time: Duration::ZERO, ..Default::default() };
    let compiler = Compiler::new(SMALL.vocabulary.clone(), limits);
    let pending = compiler.submit(GrammarSpec::JsonObject);
    assert_eq!(
        pending.poll().map(|r| r.map(|_| ())),
        Some(Err(CompileError::TooSlow { limit_ms: 0 }))
    );
    assert!(pending.wait().is_err());
    // Nothing of it is kept: with time the same specification compiles.
    assert!(SMALL.compile(GrammarSpec::JsonObject).is_ok());
}

#[test]
fn too_many_at_once() {
    let limits = CompilerLimits { threads: 1, waiting: 2, ..Default::default() };
    let compiler = Compiler::new(SMALL.vocabulary.clone(), limits);
    let specs = (0..50).map(|i| GrammarSpec::Regex(format!("x{{{i}}}[a-z]{{1,200}}y")));
    let results: Vec<_> = specs.map(|s| compiler.submit(s)).collect();
    let results: Vec<_> = results.into_iter().map(|p| p.wait()).collect();
    assert!(results.iter().any(Result::is_ok));
    for result in results {
        if let Err(error) = result {
            assert!(matches!(error, CompileError::Busy { .. }), "{error:?}");
        }
    }
    // Afterwards there is room again.
    assert!(compiler.compile(GrammarSpec::Regex("z".into())).is_ok());
}

/// Equal specifications share a compilation; the cache forgets the oldest.
#[test]
fn results_are_kept() {
    let limits = CompilerLimits { cached: 2, ..Default::default() };
    let compiler = Compiler::new(SMALL.vocabulary.clone(), limits);
    let bad = GrammarSpec::JsonSchema(json!({"type": "x"}));
    let first = compiler.compile(bad.clone()).unwrap_err();
    for i in 0..6 {
        compiler.compile(GrammarSpec::Regex(format!("a{i}"))).unwrap();
        assert_eq!(compiler.compile(bad.clone()).unwrap_err(), first);
    }
    let handles: Vec<_> = (0..8).map(|_| compiler.submit(GrammarSpec::JsonObject)).collect();
    assert!(handles.iter().all(|h| h.wait().is_ok()));
}
